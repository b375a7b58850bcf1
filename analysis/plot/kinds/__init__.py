"""Kinds of pictures of `ebbtide plot`: a file per kind, whose docstring says what it draws."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from ebbtide.errors import UserError

if TYPE_CHECKING:
    from ebbtide.analysis.plot.panels import PlotPanel, View


class Layout(NamedTuple):
    """Sizes of panels in inches, and the least free memory of a window in bytes."""

    tall: float
    low: float
    min_bytes: int

    @property
    def middle(self) -> float:
        """Height between tall and low."""
        return (self.tall + self.low) / 2


class PlotKind(Protocol):
    """The module of a kind."""

    CONTENT: str  # What the picture shows, for its title.

    def panels(self, view: View, layout: Layout) -> Sequence[PlotPanel]:
        """Return the panels of one trace, from the top. Raises TraceError where nothing was recorded for it."""


def kind_texts() -> dict[str, str]:
    """Return the docstring of each kind by its name, without importing any."""
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py")
    return {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in files}


def find_kind(name: str) -> PlotKind:
    """Return the kind of a name. Raises UserError for any other."""
    if name not in kind_texts():
        raise UserError(f"{name!r} is no kind of picture: choose {', '.join(kind_texts())}")
    return cast(PlotKind, import_module(f"{__name__}.{name}"))
