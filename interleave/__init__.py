"""Plans, simulates and runs optimizer updates, based on what traces show of a job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.features.layers.engine.moving import (
        move_layers,
        offload_activations,
        stream_weights,
    )
    from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
    from ebbtide.interleave.engine.optimizer import InterleavedOptimizer

__all__ = [
    "InterleavedAdamW",
    "InterleavedOptimizer",
    "move_layers",
    "offload_activations",
    "stream_weights",
]
_MODULES = {
    "InterleavedAdamW": "interleaved_adamw",
    "InterleavedOptimizer": "optimizer",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: only training needs torch and numba.
    if name in _MODULES:
        return getattr(
            import_module(f"ebbtide.interleave.engine.{_MODULES[name]}"), name
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ebbtide.seams import public_name

    return public_name(__name__, name)
