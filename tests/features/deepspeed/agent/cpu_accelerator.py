"""Lets SuperOffload, and ZenFlow at stage 3, run on DeepSpeed's CPU accelerator, for
tests and benchmarks.

DeepSpeed 0.19.8 refuses SuperOffload there, which also waits for a stream that the
accelerator does not have, and ZenFlow at stage 3 creates tensors on "cuda" by name.
What they do is otherwise independent of the device.
"""

from __future__ import annotations

from typing import Any

import torch


class _Replacing:
    """An object with the attributes of another one, except for some."""

    def __init__(self, original: Any, **replacements: Any) -> None:
        self._original = original
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _FinishedStream:
    """A stream on which nothing is in flight."""

    def synchronize(self) -> None:
        """Return at once."""


def _on_cpu(create: Any) -> Any:
    return lambda *args, device=None, **options: create(
        *args, device="cpu" if device == "cuda" else device, **options
    )


def lift_device_checks() -> None:
    """Replace what ties SuperOffload and ZenFlow's stage 3 to CUDA, in this process."""
    from deepspeed.runtime.superoffload import superoffload_stage3
    from deepspeed.runtime.zenflow import engine_stage3

    accelerator = _Replacing(
        superoffload_stage3.get_accelerator(), current_stream=_FinishedStream
    )
    superoffload_stage3._validate_superoffload_accelerator = lambda: None
    superoffload_stage3.get_accelerator = lambda: accelerator
    engine_stage3.torch = _Replacing(
        torch, zeros=_on_cpu(torch.zeros), tensor=_on_cpu(torch.tensor)
    )
