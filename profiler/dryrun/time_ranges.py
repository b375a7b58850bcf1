"""Ranges of the times of iterations and phases, from the cases of the clock."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ebbtide.phases import ITERATION_PARTS, OTHER
from ebbtide.profiler.dryrun.phase_tracker import FakePhase
from ebbtide.profiler.dryrun.time_priors import CASES

ITERATION = "iteration"


def case_times_ns(phases: list[FakePhase], case: int) -> dict[int, dict[str, int]]:
    """Return ns per iteration and part (`iteration`, phases, `other`) in a case, by the device's times.

    An iteration begins where the one before ended, the first one at 0, and ends with its last phase.
    """
    spent: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys((ITERATION, *ITERATION_PARTS), 0))
    ends: dict[int, int] = {}
    for phase in phases:
        if phase.iteration is not None:
            start, end = phase.gpu_start[case], phase.gpu_end[case]
            spent[phase.iteration][phase.phase] += end - start
            ends[phase.iteration] = max(ends.get(phase.iteration, 0), end)
    previous = 0
    for iteration in sorted(spent):
        parts = spent[iteration]
        parts[ITERATION] = ends[iteration] - previous
        parts[OTHER] = max(0, parts[ITERATION] - sum(parts[part] for part in ITERATION_PARTS if part != OTHER))
        previous = ends[iteration]
    return dict(spent)


def predicted_times(phases: list[FakePhase], rank: int) -> list[dict[str, Any]]:
    """Return the least and the largest time of each part of each iteration over the cases, as meta.json has them."""
    cases = [case_times_ns(phases, case) for case in range(len(CASES))]
    rows = []
    for iteration, parts in cases[0].items():
        for part in parts:
            times = [case[iteration][part] / 1e6 for case in cases]
            rows.append(
                {"rank": rank, "iteration": iteration, "phase": part, "low_ms": min(times), "high_ms": max(times)}
            )
    return rows
