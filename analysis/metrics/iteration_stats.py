"""Compares iterations and ranks: medians, spread, outliers, the slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.iterations import rank_durations, steady_iterations
from ebbtide.analysis.timeseries.statistics import scaled_mad
from ebbtide.phases import ITERATION_PARTS, PHASES
from ebbtide.profiler.trace import Trace

# An iteration is an outlier if it is more than this many scaled median absolute deviations from the median, and more
# than 2 % of the median: the modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), with
# their 3.5.
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
    spread_ms: float  # Scaled median absolute deviation, which for normal noise is the standard deviation.
    min_ms: float  # Smallest time.
    max_ms: float  # Largest time.
    outliers: list[int]  # Numbers of the iterations that are far from the median; also `odd` in JSON.


@dataclass(frozen=True, repr=False)
class Iterations(TabularResult):
    """Times of all iterations and ranks.

    Attributes:
        counted: How many steady iterations medians are over.
        warmup: Numbers of the iterations that are left out.
        spreads: One entry per rank and phase.
        rows: A dict per rank and iteration with its milliseconds per phase.
        slowest_rank: For each rank in how many iterations its phases took longest; None with one rank.
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
        """Return a row per rank and iteration: milliseconds per phase, and whether medians leave it out (`warmup`)."""
        columns = ["rank", "iteration", "warmup", *(f"{phase}_ms" for phase in _TIMES)]
        return pd.DataFrame(self.rows, columns=columns).astype(dict.fromkeys(columns[3:], "float64"))


def compare_iterations(trace: Trace, ranks: Sequence[int] | None = None) -> Iterations:
    """Compare the iterations and ranks of a trace. Spreads and rows are about `ranks` (None: all); the slowest rank is
    always found among all."""
    numbers = set(steady_iterations(trace).numbers)
    spreads, rows = [], []
    totals: dict[int, pd.Series[float]] = {}
    warmup: set[int] = set()
    for rank in trace.ranks:
        table = rank_durations(trace, rank).frame
        if table.empty:
            continue
        warmup |= {int(number) for number in table.index} - numbers
        steady = table[table.index.isin(numbers)]
        totals[rank] = steady[list(PHASES)].sum(axis=1)
        if ranks is not None and rank not in ranks:
            continue
        for phase in _TIMES:
            if steady[phase].notna().any():
                spreads.append(_spread(rank, phase, steady[phase].dropna()))
        for number, values in zip(table.index, table[list(_TIMES)].itertuples(index=False, name=None), strict=True):
            figures = {f"{p}_ms": None if np.isnan(ms) else ms for p, ms in zip(_TIMES, values, strict=True)}
            rows.append({"rank": rank, "iteration": int(number), "warmup": number not in numbers, **figures})
    return Iterations(len(numbers), sorted(warmup), spreads, rows, _slowest(totals))


def outliers(values: pd.Series[float]) -> list[int]:
    """Return the labels of the values that are far from the median."""
    distance = (values - values.median()).abs()
    limit = max(_OUTLIER_DEVIATIONS * scaled_mad(values), _OUTLIER_SHARE * abs(float(values.median())))
    return [int(label) for label in values.index[distance > max(limit, _NANOSECOND_MS)]]


def _spread(rank: int, phase: str, values: pd.Series[float]) -> Spread:
    return Spread(
        rank=rank,
        phase=phase,
        median_ms=float(values.median()),
        spread_ms=scaled_mad(values),
        min_ms=float(values.min()),
        max_ms=float(values.max()),
        outliers=outliers(values),
    )


def _slowest(totals: dict[int, pd.Series[float]]) -> dict[int, int] | None:
    if len(totals) < 2:
        return None
    table = pd.DataFrame(totals).dropna()
    slowest = table.idxmax(axis=1)
    # Ranks with equal times, to the nanosecond, are copies of one rank: none of them is the slowest.
    slowest = slowest[table.nunique(axis=1) > 1]
    return {rank: int((slowest == rank).sum()) for rank in totals}
