"""Rules as entries of a TOML file of the folder `rules`.

An entry has a `name`; `where`, bounds of figures as in `share = ">= 0.9"`; a `title`,
lines of `evidence` and `advice`, with words in braces. The first entry of a name whose
bounds hold speaks. A line of evidence with a word that is not known is left out.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from ebbtide.features.explain.answer import Answer
from ebbtide.features.explain.record import Place

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def holds(where: Mapping[str, str], figures: Mapping[str, float | None]) -> bool:
    """Return whether all bounds hold; a figure that is not known is in none."""
    for name, bound in where.items():
        sign, number = bound.split()
        figure = figures.get(name)
        value = math.nan if figure is None else figure
        if not _OPERATORS[sign](value, float(number)):
            return False
    return True


def entry_answer(
    entry: Mapping[str, Any], words: Mapping[str, Any], *places: Place
) -> Answer:
    """Return the answer of an entry, whose words are filled in."""
    lines = []
    for line in entry.get("evidence", ()):
        try:
            lines.append(line.format_map(words))
        except KeyError:
            continue
    return Answer(
        rule=entry["name"],
        title=entry["title"].format_map(words),
        evidence=tuple(lines),
        advice=entry.get("advice"),
        places=places,
    )
