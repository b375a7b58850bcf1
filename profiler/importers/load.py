"""Imports files of other tools into traces."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.features.importers.load import import_trace

__all__ = ["import_trace"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ebbtide.seams import public_name

    return public_name(__name__, name)
