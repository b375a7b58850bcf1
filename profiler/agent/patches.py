"""Attributes of other people's classes and modules, replaced for a while."""

from __future__ import annotations

from typing import Any, Callable


class Patches:
    """Replaces attributes, and puts all of them back at `undo`, the last first."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Put `wrapper(original)` in its place, where `owner` itself has such an attribute."""
        original = getattr(owner, "__dict__", {}).get(name)
        if original is not None:
            self.set(owner, name, wrapper(original))

    def undo(self) -> None:
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
