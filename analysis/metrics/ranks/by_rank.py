"""Summarizes the iterations of each rank in one row."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.devices import first_device
from ebbtide.analysis.metrics.iteration_stats import compare_iterations
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.ranks.comparison import RankDifferences, rank_differences
from ebbtide.analysis.metrics.ranks.rank_series import rank_series
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class RankRow:
    """Medians of one rank over the steady iterations; None where not recorded."""

    rank: int
    host: str | None  # Its host.
    # `iteration_ms`, `forward_ms`, `backward_ms`, `update_ms`, `other_ms`: times.
    iteration_ms: float | None
    forward_ms: float | None
    backward_ms: float | None
    update_ms: float | None
    other_ms: float | None
    phases_ms: float | None  # Time of all phases, without `other`.
    free_bytes: float | None  # Least free memory of an iteration.
    # `h2d_bytes_per_s`, `d2h_bytes_per_s`: rate of copies while they run, or the
    # highest sampled rate.
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    # In how many iterations its phases took longest; None with one rank.
    times_slowest: int | None
    # The cause where it differs from the others, alone or with its host; else None.
    cause: str | None
    # Model of its device, else the device; None if neither is known.
    device_name: str | None


@dataclass(frozen=True, repr=False)
class RankTable(TabularResult, table="ranks"):
    """A row per rank, and the ranks that differ."""

    counted: int  # How many steady iterations medians are over.
    ranks: list[RankRow]  # The rows.
    differences: RankDifferences  # The ranks that differ from the others.

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide summary --by rank --json` prints."""
        rows = [asdict(row) for row in self.ranks]
        return {
            "counted": self.counted,
            "ranks": rows,
            "rank_differences": self.differences.as_json(),
        }


_MEDIANS = [
    field.name
    for field in fields(RankRow)
    if field.name.endswith(("_ms", "_bytes", "_bytes_per_s"))
]


def rank_table(trace: Trace) -> RankTable:
    """Summarize each rank of a trace."""
    differences = rank_differences(trace)
    causes = {
        rank: difference.cause
        for difference in reversed(differences.differences)
        for rank in difference.ranks
    }
    slowest = compare_iterations(trace, []).slowest_rank or {}
    rows = []
    for rank in trace.ranks:
        series = rank_series(trace, rank)
        device = first_device(trace, rank)
        facts: dict[str, Any] = {
            column: median_or_none(series.columns[column]) for column in _MEDIANS
        }
        facts |= {
            "cause": causes.get(rank),
            "device_name": device.name or device.device,
        }
        rows.append(
            RankRow(
                rank, trace.rank(rank).host, **facts, times_slowest=slowest.get(rank)
            )
        )
    return RankTable(len(steady_iterations(trace).numbers), rows, differences)
