"""Callbacks that put the figures of `ebbtide.metrics` into the logs of training frameworks.

Importing this package imports no framework; each class is imported with its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.profiler.callbacks.hugging_face import HuggingFaceCallback
    from ebbtide.profiler.callbacks.lightning_trainer import LightningCallback

__all__ = ["HuggingFaceCallback", "LightningCallback"]
_MODULES = {"HuggingFaceCallback": "hugging_face", "LightningCallback": "lightning_trainer"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
