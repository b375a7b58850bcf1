"""Compares two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.two_samples import (
    DifferenceInterval,
    beyond_spread,
    difference_interval,
)
from ebbtide.features.diff.runs import PHASE_SIZES, ComparedRun, run_of_trace
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

# Confidence of the intervals that limits are compared with: the growth is at least
# `low` in 95 % of cases.
_OF_LIMITS = 0.90


# A figure below this share of the other one is nothing beside it.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class Change:
    """A figure of both runs, None where it is not known."""

    name: str  # The phase, `iteration` or the memory pool; `of` in JSON.
    a: float | None  # The figure of the first run.
    b: float | None  # The figure of the second run.

    @property
    def difference(self) -> float | None:
        """b - a; None where one is not known."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def ratio(self) -> float | None:
        """b / a; None where one is not known, or a is nothing beside b."""
        if self.a is None or self.b is None or self.a == 0:
            return None
        return None if abs(self.a) < _LEAST_SHARE * abs(self.b) else self.b / self.a

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `ebbtide diff --json`."""
        return {
            "of": self.name,
            "a": self.a,
            "b": self.b,
            "difference": self.difference,
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class TimeChange(Change):
    """Median milliseconds of both runs."""

    # Whether the medians differ by more than their spread; see `beyond_spread`.
    beyond_spread: bool | None
    # The least and the largest difference b - a that the iterations allow; see
    # `difference_interval`.
    interval: DifferenceInterval | None
    # The same, of less confidence, for limits (`gate.py`).
    limit_interval: DifferenceInterval | None

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether the difference can be told apart from noise.

        The interval does not contain 0 then. None with fewer than three iterations in
        one of the runs.
        """
        return (
            None
            if self.interval is None
            else not self.interval.low <= 0 <= self.interval.high
        )

    @property
    def is_uncertain(self) -> bool:
        """Whether there is a difference within the spread of the medians, whose size is
        uncertain."""
        return bool(self.is_distinguishable) and not self.beyond_spread

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `ebbtide diff --json`."""
        interval = None if self.interval is None else asdict(self.interval)
        distinct = {
            "beyond_spread": self.beyond_spread,
            "distinguishable": self.is_distinguishable,
        }
        return {**super().as_json(), **distinct, "difference_interval": interval}


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs between the metadata of both runs."""

    setting: str  # Its path in the metadata; `what` in JSON.
    a: Any  # Its value in the first run; None if not recorded.
    b: Any  # Its value in the second run; None if not recorded.

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `ebbtide diff --json`."""
        return {"what": self.setting, "a": self.a, "b": self.b}


@dataclass(frozen=True)
class Diff:
    """Comparison of two runs."""

    a: str  # Path of the first trace.
    b: str  # Path of the second trace.
    # Number of steady iterations of each, which medians are over.
    counted: tuple[int, int]
    median_ms: list[TimeChange]  # Times of the iteration and its phases.
    peak_bytes: list[Change]  # Peak of each memory pool.
    min_free_bytes: list[Change]  # Least free memory in each phase.
    h2d_bytes: list[Change]  # Bytes moved to the device in each phase.
    d2h_bytes: list[Change]  # Bytes moved to the host in each phase.
    setting_changes: list[SettingChange]  # Settings that differ; `facts` in JSON.
    totals: list[Change]  # Figures of the whole traces, which need no iterations.
    # Mean milliseconds of each kernel in an iteration of the first rank, largest change
    # first.
    kernels: list[Change]
    # The same by operator that launched the kernels; empty unless both runs state it.
    operators: list[Change]
    predicted: tuple[bool, bool]  # Whether a dry run made each.

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide diff --json` prints."""
        figures = (
            "median_ms",
            "peak_bytes",
            "min_free_bytes",
            "h2d_bytes",
            "d2h_bytes",
        )
        others = ("totals", "kernels", "operators")
        return {
            "a": self.a,
            "b": self.b,
            "counted_iterations": {"a": self.counted[0], "b": self.counted[1]},
            **{
                name: [change.as_json() for change in getattr(self, name)]
                for name in (*figures, *others)
            },
            "facts": [change.as_json() for change in self.setting_changes],
            **(
                {"predicted": {"a": self.predicted[0], "b": self.predicted[1]}}
                if any(self.predicted)
                else {}
            ),
        }


def compare(a: Trace | ComparedRun, b: Trace | ComparedRun) -> Diff:
    """Compare two runs by their summaries: medians over the steady iterations, times of
    the slowest rank, peaks of the rank with the largest.

    Settings that only one of the runs states are not compared."""
    first, second = (
        run_of_trace(run) if isinstance(run, Trace) else run for run in (a, b)
    )

    def changes(
        of_first: Mapping[str, float | None], of_second: Mapping[str, float | None]
    ) -> list[Change]:
        names = {**of_first, **of_second}
        return [Change(name, of_first.get(name), of_second.get(name)) for name in names]

    def by_label(
        of_first: Mapping[str, float], of_second: Mapping[str, float]
    ) -> list[Change]:
        if not of_first or not of_second:
            return []
        # What one of them does not run takes no time in it.
        none = dict.fromkeys({**of_first, **of_second}, 0.0)
        return sorted(
            changes({**none, **of_first}, {**none, **of_second}),
            key=lambda change: -abs(change.difference or 0),
        )

    sizes = {
        size: changes(first.sizes[size], second.sizes[size]) for size in PHASE_SIZES
    }
    settings = {}
    if (of_a := first.settings) is not None and (of_b := second.settings) is not None:
        settings = {name: (of_a.get(name), of_b.get(name)) for name in {**of_a, **of_b}}
    return Diff(
        a=first.path,
        b=second.path,
        counted=(first.counted, second.counted),
        median_ms=[
            _time_change(part, times, second.times_ms[part])
            for part, times in first.times_ms.items()
        ],
        peak_bytes=sorted(
            changes(first.peaks, second.peaks), key=lambda change: change.name
        ),
        **sizes,
        setting_changes=[
            SettingChange(name, *values)
            for name, values in settings.items()
            if values[0] != values[1]
        ],
        totals=changes(first.totals, second.totals),
        kernels=by_label(first.kernels_ms, second.kernels_ms),
        operators=by_label(first.operators_ms, second.operators_ms),
        predicted=(first.is_predicted, second.is_predicted),
    )


def _time_change(part: str, a: pd.Series[float], b: pd.Series[float]) -> TimeChange:
    medians = median_or_none(a), median_or_none(b)
    return TimeChange(
        part,
        *medians,
        beyond_spread(a, b),
        difference_interval(a, b),
        difference_interval(a, b, _OF_LIMITS),
    )
