"""Compares iterations and ranks: medians, spread, outliers, the slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.iterations import (
    IterationTable,
    rank_durations,
    steady_iterations,
)
from ebbtide.analysis.timeseries.statistics import scaled_mad
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.phases import ITERATION_PARTS, PHASES
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

# An iteration is an outlier if it is more than this many scaled median absolute
# deviations from the median, and more than 2 % of the median: the modified z-score of
# Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), with their 3.5.
_OUTLIER_DEVIATIONS = 3.5
_OUTLIER_SHARE = 0.02
# Times are whole nanoseconds: a smaller difference comes from rounding.
_NANOSECOND_MS = 1e-6
_TIMES = ("iteration", *ITERATION_PARTS)


@dataclass(frozen=True)
class Spread:
    """Times of one phase of one rank over the steady iterations."""

    rank: int
    phase: str  # A phase, `other`, or `iteration`.
    median_ms: float  # Median.
    # Scaled median absolute deviation, which for normal noise is the standard
    # deviation.
    spread_ms: float
    min_ms: float  # Smallest time.
    max_ms: float  # Largest time.
    # Numbers of the iterations that are far from the median; also `odd` in JSON.
    outliers: list[int]


@dataclass(frozen=True, repr=False)
class Iterations(TabularResult):
    """Times of all iterations and ranks.

    Attributes:
        counted: How many steady iterations medians are over.
        warmup: Numbers of the iterations that are left out.
        spreads: One entry per rank and phase.
        rows: A dict per rank and iteration with its milliseconds per phase.
        slowest_rank: For each rank in how many iterations its phases took longest; None
            with one rank.
    """

    counted: int
    warmup: list[int]
    spreads: list[Spread]
    rows: list[dict[str, Any]]
    slowest_rank: dict[int, int] | None

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide summary --by iteration --json` prints."""
        printed = asdict(self)
        for spread in printed["spreads"]:
            # The former name of the key.
            spread["odd"] = spread["outliers"]
        return printed

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per rank and iteration with milliseconds per phase, and whether
        medians leave it out (`warmup`)."""
        import pandas as pd

        columns = ["rank", "iteration", "warmup", *(f"{phase}_ms" for phase in _TIMES)]
        return pd.DataFrame(self.rows, columns=columns).astype(
            dict.fromkeys(columns[3:], "float64")
        )


def compare_iterations(trace: Trace, ranks: Sequence[int] | None = None) -> Iterations:
    """Compare the iterations and ranks of a trace. Spreads and rows are about `ranks`
    (None: all); the slowest rank is always found among all."""
    numbers = steady_iterations(trace).numbers
    spreads, rows = [], []
    totals: dict[int, Floats] = {}
    warmup: set[int] = set()
    for rank in trace.ranks:
        table = rank_durations(trace, rank)
        if not len(table.numbers):
            continue
        warmup |= set(table.numbers.tolist()) - set(numbers)
        steady = table.only(numbers)
        totals[rank] = (
            IterationTable(steady.numbers, {"ms": steady.total(PHASES)})
            .at(numbers)
            .columns["ms"]
        )
        if ranks is not None and rank not in ranks:
            continue
        for phase in _TIMES:
            recorded = ~np.isnan(steady.columns[phase])
            if recorded.any():
                values = steady.columns[phase][recorded]
                least, most, median = (
                    float(values.min()),
                    float(values.max()),
                    float(np.median(values)),
                )
                far = outliers(steady.numbers[recorded], values)
                spreads.append(
                    Spread(rank, phase, median, scaled_mad(values), least, most, far)
                )
        times = zip(*(table.columns[phase].tolist() for phase in _TIMES), strict=True)
        for number, row in zip(table.numbers.tolist(), times, strict=True):
            figures = {
                f"{p}_ms": None if np.isnan(ms) else ms
                for p, ms in zip(_TIMES, row, strict=True)
            }
            rows.append(
                {
                    "rank": rank,
                    "iteration": number,
                    "warmup": number in warmup,
                    **figures,
                }
            )
    return Iterations(len(numbers), sorted(warmup), spreads, rows, _slowest(totals))


def outliers(numbers: Ints, values: Floats) -> list[int]:
    """Return the numbers of the values that are far from the median."""
    median = float(np.median(values))
    distance = np.abs(values - median)
    limit = max(_OUTLIER_DEVIATIONS * scaled_mad(values), _OUTLIER_SHARE * abs(median))
    far: list[int] = numbers[distance > max(limit, _NANOSECOND_MS)].tolist()
    return far


def _slowest(totals: dict[int, Floats]) -> dict[int, int] | None:
    if len(totals) < 2:
        return None
    table = np.stack([*totals.values()])
    table = table[:, ~np.isnan(table).any(axis=0)]
    # Ranks with equal times, to the nanosecond, are copies of one rank: none of them is
    # the slowest.
    slowest = table.argmax(axis=0)[table.max(axis=0) > table.min(axis=0)]
    return dict(
        zip(totals, np.bincount(slowest, minlength=len(totals)).tolist(), strict=True)
    )
