"""Plans, simulates and runs optimizer updates from what a trace shows."""

from typing import Any

__all__ = ["InterleavedAdamW"]


def __getattr__(name: str) -> Any:
    # Only who trains needs torch and numba.
    if name == "InterleavedAdamW":
        from ebbtide.interleave.engine.optimizer import InterleavedAdamW

        return InterleavedAdamW
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
