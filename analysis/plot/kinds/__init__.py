"""Kinds of pictures of `ebbtide plot`.

Each has a file, whose docstring says what it draws.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from ebbtide.errors import UserError
from ebbtide.seams import Plug, plugs

if TYPE_CHECKING:
    from ebbtide.analysis.plot.panels import PanelDrawing, View


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

    def panels(self, view: View, layout: Layout) -> Sequence[PanelDrawing]:
        """Return the panels of one trace, from the top. Raises TraceError where nothing
        was recorded for it."""


def kind_texts() -> dict[str, str]:
    """Return the docstring of each kind by its name, without importing any."""
    texts = {}
    for name, plug in _kinds().items():
        spec = find_spec(f"{plug.package}.{plug.target}")
        assert spec is not None
        assert spec.origin is not None
        texts[name] = (
            ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
            or ""
        )
    return texts


def _kinds() -> dict[str, Plug]:
    own = [
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if path.name != "__init__.py"
    ]
    kinds = {name: Plug(__name__, name) for name in own}
    kinds.update(plugs("plots"))
    return dict(sorted(kinds.items()))


def find_kind(name: str) -> PlotKind:
    """Return the kind of a name. Raises UserError for any other."""
    kinds = _kinds()
    if name not in kinds:
        raise UserError(f"{name!r} is no kind of picture: choose {', '.join(kinds)}")
    return cast(PlotKind, kinds[name].load())
