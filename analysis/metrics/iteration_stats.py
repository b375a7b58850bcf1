"""Iterations and ranks held against each other: what is usual, how far it spreads, which ones are odd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.iterations import PHASES, counted, durations_ms, intervals
from ebbtide.profiler.trace import Trace

# An iteration is odd where it lies this many scaled median absolute deviations from the median, and 2 % of it: the
# modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), with their 3.5.
_ODD_DEVIATIONS = 3.5
_ODD_SHARE = 0.02
_MAD_SCALE = 1.4826
# Times are whole nanoseconds: a smaller difference is what rounding left.
_NANOSECOND_MS = 1e-6


@dataclass(frozen=True)
class Spread:
    """Milliseconds of one phase (or `iteration`) of one rank over the counted iterations. spread_ms: scaled median
    absolute deviation, which for normal noise is the standard deviation. odd: iterations far from the median."""

    rank: int
    phase: str
    median_ms: float
    spread_ms: float
    min_ms: float
    max_ms: float
    odd: list[int]


@dataclass(frozen=True)
class Iterations:
    """warmup: the iterations that are left out. rows: a dict per rank and iteration with its milliseconds per phase.
    slowest_rank: how often each rank, of all, was the one whose phases took longest; None with one rank."""

    counted: int
    warmup: list[int]
    spreads: list[Spread]
    rows: list[dict[str, Any]]
    slowest_rank: dict[int, int] | None

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide iterations --json` prints."""
        return asdict(self)

    def to_pandas(self) -> pd.DataFrame:
        """A row per rank and iteration: milliseconds per phase, and whether medians leave it out (`warmup`)."""
        columns = ["rank", "iteration", "warmup", *(f"{phase}_ms" for phase in ("iteration", *PHASES))]
        return pd.DataFrame(self.rows, columns=columns).astype(dict.fromkeys(columns[3:], "float64"))


def iterations(trace: Trace, ranks: Sequence[int] | None = None) -> Iterations:
    """Hold the iterations and ranks of a trace against each other; spreads and rows of all ranks or some."""
    numbers = set(counted(trace)[0])
    spreads, rows = [], []
    totals: dict[int, pd.Series[float]] = {}
    warmup: set[int] = set()
    for rank in trace.ranks:
        cut = intervals(trace, rank)
        if cut.spans.empty:
            continue
        table = durations_ms(cut)
        warmup |= {int(number) for number in table.index} - numbers
        usual = table[table.index.isin(numbers)]
        totals[rank] = usual[["forward", "backward", "update"]].sum(axis=1)
        if ranks is not None and rank not in ranks:
            continue
        for phase in ("iteration", *PHASES):
            if usual[phase].notna().any():
                spreads.append(_spread(rank, phase, usual[phase].dropna()))
        phases = ["iteration", *PHASES]
        for number, times in zip(table.index, table[phases].itertuples(index=False, name=None), strict=True):
            values = {f"{p}_ms": None if np.isnan(ms) else ms for p, ms in zip(phases, times, strict=True)}
            rows.append({"rank": rank, "iteration": int(number), "warmup": number not in numbers, **values})
    return Iterations(len(numbers), sorted(warmup), spreads, rows, _slowest(totals))


def odd(values: pd.Series[float]) -> list[int]:
    """The labels of values that lie far from the median of all."""
    distance = (values - values.median()).abs()
    limit = max(_ODD_DEVIATIONS * _MAD_SCALE * float(distance.median()), _ODD_SHARE * abs(float(values.median())))
    return [int(label) for label in values.index[distance > max(limit, _NANOSECOND_MS)]]


def _spread(rank: int, phase: str, values: pd.Series[float]) -> Spread:
    median = float(values.median())
    return Spread(
        rank=rank,
        phase=phase,
        median_ms=median,
        spread_ms=_MAD_SCALE * float((values - median).abs().median()),
        min_ms=float(values.min()),
        max_ms=float(values.max()),
        odd=odd(values),
    )


def _slowest(totals: dict[int, pd.Series[float]]) -> dict[int, int] | None:
    if len(totals) < 2:
        return None
    table = pd.DataFrame(totals).dropna()
    slowest = table.idxmax(axis=1)
    # Ranks that took as long as each other, to the nanosecond, are copies of one: nobody is slowest then.
    slowest = slowest[table.nunique(axis=1) > 1]
    return {rank: int((slowest == rank).sum()) for rank in totals}
