"""Temporary replacements of attributes of the job's classes and modules."""

from __future__ import annotations

from typing import Any, Callable

_MISSING = object()


class Patches:
    """Replaces attributes, and restores all of them at `undo`, the last one first."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of `owner`, which it may inherit or lack."""
        self._originals.append((owner, name, owner.__dict__.get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace an attribute by `wrapper(original)`; do nothing if `owner` itself does not have it."""
        original = getattr(owner, "__dict__", {}).get(name)
        if original is not None:
            self.set(owner, name, wrapper(original))

    def undo(self) -> None:
        """Restore every attribute that was replaced."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
