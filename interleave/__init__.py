"""Plans, simulates and runs optimizer updates, based on what traces show of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.interleave.engine.optimizer import InterleavedAdamW

__all__ = ["InterleavedAdamW"]


def __getattr__(name: str) -> Any:
    # Imported on first use: only training needs torch and numba.
    if name == "InterleavedAdamW":
        from ebbtide.interleave.engine.optimizer import InterleavedAdamW

        return InterleavedAdamW
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
