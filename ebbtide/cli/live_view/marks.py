"""Letters, colours and block characters of the view: nothing is told by colour alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.text import Text

from ebbtide.analysis.timeline.styles import COLORS
from ebbtide.phases import ITERATION_PARTS

LETTERS = {"forward": "F", "backward": "B", "update": "U", "other": "·"}
_LEVELS = " ▁▂▃▄▅▆▇█"
TITLE = "bold"
DIM = "dim"


def phase_style(phase: str) -> str:
    """Return the style of a letter of a phase: dark on the colour that the phase has in plots."""
    foreground = "#d3d9de" if phase == "other" else "#101418"
    return f"{foreground} on {COLORS[phase].dark}"


def line_style(name: str) -> str:
    """Return the style of a line in the colour that it has in plots, on dark ground."""
    return COLORS[name].dark


def legend() -> Text:
    """Return the letters of the phases with their names."""
    text = Text()
    for phase in ITERATION_PARTS:
        text.append(f" {LETTERS[phase]} ", phase_style(phase))
        text.append(f" {phase}  ")
    return text


def level_rows(shares: Iterable[float], height: int) -> list[str]:
    """Draw columns of blocks.

    Args:
        shares: Height of each column, from 0 to 1; NaN leaves it empty. A value above 0 has at least the lowest block.
        height: Number of rows.

    Returns:
        The rows, the top one first.
    """
    steps = (len(_LEVELS) - 1) * height
    levels = [0 if math.isnan(share) else min(steps, math.ceil(share * steps - 1e-9)) for share in shares]
    full = len(_LEVELS) - 1
    return [
        "".join(_LEVELS[min(full, max(0, level - row * full))] for level in levels) for row in reversed(range(height))
    ]


def lines(rows: Sequence[Text], width: int, height: int) -> Text:
    """Join rows to a text of at most a width and a height; what does not fit is cut off."""
    kept = list(rows)[: max(height, 0)]
    for row in kept:
        row.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(kept)


def title(name: str, details: str = "") -> Text:
    """Return the first row of a panel."""
    return Text.assemble((name, TITLE), ("  " + details if details else "", DIM))
