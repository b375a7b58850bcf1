"""Finds where iterations end: where optimizers stepped, else where a forward follows a backward."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ebbtide.phases import BACKWARD, FORWARD
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.trace.spool_records import Records

_FORWARD, _BACKWARD = (kinds.PHASES.index(phase) for phase in (FORWARD, BACKWARD))

_REMEDY = 'Tracer(...).phase("update")'

NO_OPTIMIZER_NOTE = (
    "no optimizer of torch stepped: iterations are cut where a forward follows a backward, and updates are missing; "
    f"mark them with {_REMEDY}"
)


def iteration_ends(records: Records) -> dict[int, int]:
    """Return the sequence number of the last phase of each finished iteration, in order."""
    ends = records[records["kind"] == kinds.ITERATION]
    if not len(ends):
        return _ends_at_boundaries(records)
    # A later record of the same iteration replaces the earlier: a second optimizer extended it.
    return dict(sorted(zip(ends["a"].tolist(), ends["b"].tolist(), strict=True)))


def note_on_iterations(records: Records) -> str | None:
    """Return the note on iterations that no optimizer ended; None where there are none of these."""
    if (records["kind"] == kinds.ITERATION).any() or not iteration_ends(records):
        return None
    return NO_OPTIMIZER_NOTE


def explain_no_iterations(phases: Iterable[str]) -> str:
    """Return the warning about a trace without a finished iteration, from the phases that it has."""
    seen = set(phases)
    if BACKWARD in seen:
        return "no training iteration ended while it was recorded"
    where = (
        "modules ran forward with gradients, but nothing ran backward" if FORWARD in seen else "nothing ran backward"
    )
    return (
        f"no training iteration was seen: {where}; phases that cannot be detected (a step compiled as one function) "
        'can be marked with Tracer(...).phase("forward"), "backward" and "update"'
    )


def _ends_at_boundaries(records: Records) -> dict[int, int]:
    """Return the ends of iterations in a job in which no optimizer stepped.

    The agent counts the same boundaries, to know where the iterations to record begin.
    """
    phases = records[records["kind"] == kinds.PHASE]
    phases = phases[np.argsort(phases["a"], kind="stable")]
    backwards = np.cumsum(phases["code"] == _BACKWARD)
    if not len(phases) or not backwards[-1]:
        return {}
    is_forward = phases["code"] == _FORWARD
    after = np.flatnonzero(is_forward[1:] & ~is_forward[:-1])
    # Each iteration has a backward. What follows the last backward is not finished.
    after = after[np.diff(backwards[after], prepend=0) > 0]
    if not len(after):
        # One backward may be part of an iteration whose update was not reached.
        return {}
    last = int(np.flatnonzero(phases["code"] == _BACKWARD)[-1])
    ends = phases["a"][[*after[after < last], last]].tolist()
    starts = records[records["kind"] == kinds.START]
    first = int(starts[0]["a"]) if len(starts) else 0
    return dict(enumerate(ends, first))
