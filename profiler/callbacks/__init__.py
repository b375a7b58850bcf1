"""Callbacks that put the figures of `ebbtide.metrics` into the logs of training
frameworks, and record out of memory.

Each is imported with its own framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.profiler.callbacks.hugging_face import HuggingFaceCallback
    from ebbtide.profiler.callbacks.lightning_trainer import LightningCallback

__all__ = ["HuggingFaceCallback", "LightningCallback", "record_out_of_memory"]
_MODULES = {
    "HuggingFaceCallback": "hugging_face",
    "LightningCallback": "lightning_trainer",
}


def record_out_of_memory(path: str = "oom.ebb") -> None:
    """Record the out-of-memory errors of this process from now on.

    The first error creates a trace, for `ebbtide memory PATH --at oom`; where one
    exists, the path gets a number (oom-2.ebb). Does nothing in a process that is
    recorded, and never raises.
    """
    import torch

    from ebbtide.profiler.agent.start import start_for_errors

    start_for_errors(torch, path)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
