"""Keeps the files of the user as they are: what the job saves is counted, and what it loads gives fake tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.fake_device import FakeDeviceMode
from ebbtide.profiler.dryrun.safetensors_files import patch_safetensors
from ebbtide.profiler.dryrun.shadow_values import MAX_ELEMENTS

# Checkpoints up to this size are read, so that steps and random states in them have values.
_MAX_READ_BYTES = 64 << 20
_MAX_LISTED = 8
_LEFT_OUT = ("/dev/", "/proc/", "/sys/")
_WRITES = os.O_WRONLY | os.O_RDWR
# Experiment loggers that can be switched off from outside.
_LOGGERS = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled"}


class UserFiles:
    """The files that the job saves, loads and opens.

    Args:
        mode: The mode that fakes operations.

    Attributes:
        saved_bytes: Bytes of the tensors that the job would have saved.
        saves: How often it would have saved.
        opened: Files that it opened for writing, in order.
    """

    def __init__(self, mode: FakeDeviceMode) -> None:
        self.saved_bytes = self.saves = 0
        self.opened: dict[str, None] = {}
        self._mode = mode
        self._watching = False

    def install(self, patches: Patches) -> None:
        """Replace what saves and loads until `patches.undo()`."""
        patches.set(torch, "save", self.count_save)
        patches.set(torch, "load", self._wrap_load(torch.load))
        patch_safetensors(patches, self.count_save)
        for name, value in _LOGGERS.items():
            os.environ.setdefault(name, value)

    def watch_opens(self) -> None:
        """List from now on the files that are opened for writing. This cannot be undone in a process."""
        self._watching = True
        sys.addaudithook(self._audit)

    def stop_watching(self) -> None:
        """List no more files."""
        self._watching = False

    def count_save(self, content: Any, *_args: Any, **_kwargs: Any) -> None:
        """Count what would have been saved, and write nothing."""
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tree_iter(content)
            if isinstance(tensor, torch.Tensor)
        }
        self.saves += 1
        self.saved_bytes += sum(storages.values())

    def lines(self) -> list[str]:
        """Return lines for people about files."""
        lines = []
        if self.saves:
            times = "once" if self.saves == 1 else f"{self.saves} times"
            lines.append(f"the job saved {times}, {self.saved_bytes / 1e9:,.2f} GB in all: nothing of it was written")
        if self.opened:
            names = list(self.opened)
            rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            lines.append(f"files that the job opened for writing: {', '.join(names[:_MAX_LISTED])}{rest}")
        return lines

    def _wrap_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            is_path = isinstance(file, (str, os.PathLike))
            if is_path and Path(file).is_file() and Path(file).stat().st_size > _MAX_READ_BYTES:
                kwargs.pop("mmap", None)
                self._mode.enabled = False
                try:
                    with self._mode.fake_mode:
                        content = original(file, "cpu", *args, **kwargs)
                finally:
                    self._mode.enabled = True
            else:
                content = original(file, "cpu", *args, **kwargs)
            device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
            return tree_map_only(torch.Tensor, lambda tensor: self._loaded(tensor, device), content)

        return load

    def _loaded(self, tensor: Any, device: Any) -> Any:
        if tensor.numel() > MAX_ELEMENTS:
            tensor = self._mode.to_fake(tensor)
        return tensor.to(device)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._watching:
            return
        path, mode, flags = arguments
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITES)
        if writes and isinstance(path, str) and not path.startswith(_LEFT_OUT) and "__pycache__" not in path:
            self.opened[path] = None
