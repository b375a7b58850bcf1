"""Adapts the libraries of a job that would act otherwise on fake tensors, or start processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader

from ebbtide.profiler.agent.imports import when_imported
from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.extensions import patch_extensions


class LibraryPatches:
    """Patches of data loaders, torch.compile, transformers, extensions and NVML, from creation to `remove`.

    Args:
        patches: The replacements.

    Attributes:
        compiles: Whether the job called `torch.compile`.
    """

    def __init__(self, patches: Patches) -> None:
        self.compiles = False
        patches.set(dataloader.DataLoader, "_get_iterator", _iterate_here)
        compile_function = torch.compile

        def compile_eagerly(model: Any = None, **options: Any) -> Any:
            # DeepSpeed compiles a function of Muon whenever it is imported, whether or not the job uses it.
            if str(getattr(model, "__module__", None)).startswith("deepspeed."):
                return model
            self.compiles = True
            return compile_function(model, **options)

        patches.set(torch, "compile", compile_eagerly)
        torch.compiler.set_stance("force_eager")
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # about the hooks of this dry run
        self._cancel: Callable[[], None] = when_imported(
            "transformers.utils.import_utils",
            # It would build masks that it leaves out for real tensors.
            lambda module: patches.set(module, "is_fake_tensor", lambda _tensor: False),
        )
        self._cancel_extensions = patch_extensions(patches)

    def remove(self) -> None:
        """Stop waiting for imports, and let torch.compile work again."""
        self._cancel()
        self._cancel_extensions()
        torch.compiler.set_stance("default")


def _iterate_here(loader: Any) -> Any:
    """Load data in this process: fake tensors cannot be sent to another one."""
    loader.__dict__.update(num_workers=0, prefetch_factor=None, timeout=0)
    return dataloader._SingleProcessDataLoaderIter(loader)
