"""Departures: rules of valid plans that plans of other systems do not follow.

This is the only place that names them. `Plan.validate` leaves out these checks, and no others, for plans that name
them.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Rule = Literal[
    "an update on the CPU waits for its gradient of this iteration",
    "clipping comes before updates and uploads",
    "a subgroup has one update",
    "parameters are uploaded once",
    "storage has state only",
]
OWN_GRADIENT: Final = "an update on the CPU waits for its gradient of this iteration"
CLIPPING_FIRST: Final = "clipping comes before updates and uploads"
ONE_UPDATE: Final = "a subgroup has one update"
ONE_UPLOAD: Final = "parameters are uploaded once"
STATE_ONLY: Final = "storage has state only"


class Departures(NamedTuple):
    """The rules that a plan does not follow.

    Attributes:
        rules: The rules.
        consequence: How the results differ from those of a plan that follows them, for people; empty if they do not.
    """

    rules: frozenset[Rule] = frozenset()
    consequence: str = ""


NO_DEPARTURES: Final = Departures()
