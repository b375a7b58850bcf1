"""The figures of a part of a cycle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CyclePart:
    """A part over the steady cycles; medians of the cycles that have it.

    Attributes:
        name: As the job marks it, or what repeats; `other` for time in no part.
        runs: How often it runs in a cycle, in the median.
        median_ms: Its time in a cycle.
        share: Its share of the time of all cycles; shares add up to 1.
        iterations: Iterations that end in it, per cycle.
        peak_bytes: Peak of `Cycles.pool`.
        min_free_bytes: Least free memory of all cycles: capacity - `Cycles.free_pool`.
        change_bytes: By how much the use of `Cycles.pool` grows from its start to its
            end.
        h2d_bytes, d2h_bytes: Bytes moved to the device and to the host.
    """

    name: str
    runs: float
    median_ms: float
    share: float
    iterations: float
    peak_bytes: int | None
    min_free_bytes: int | None
    change_bytes: int | None
    h2d_bytes: int | None
    d2h_bytes: int | None
