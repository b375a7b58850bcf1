"""Finds the ranks, or whole hosts, that differ from the others, and the causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.analysis.dataframes import to_frame
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.ranks import quantities
from ebbtide.analysis.metrics.ranks.facts import unusual_facts
from ebbtide.analysis.metrics.ranks.quantities import QUANTITIES, Quantity
from ebbtide.analysis.metrics.ranks.rank_series import rank_series
from ebbtide.analysis.timeseries.outlying import median_errors, stands_out
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.profiler.trace import Trace

# With fewer iterations noise cannot be told from a difference.
MIN_ITERATIONS = 5
# Of a host that differs as a whole, at least this share of the ranks does.
_HOST_SHARE = 0.75


@dataclass(frozen=True)
class Deviation:
    """A quantity in which a rank differs.

    Attributes:
        quantity: `forward_ms` and so on, `iteration_ms`, `other_ms`; `forward_late_ms` and so on, by which a phase
            begins later than on the median rank of the host; `h2d_bytes_per_s` and `d2h_bytes_per_s`, the rate of
            copies while they run, or the highest sampled rate of an iteration; `free_bytes`, the least of an iteration;
            `sm_clock_mhz`, of the busy GPU.
        value: Median over the steady iterations; of a host, of its ranks.
        usual: The same of the median rank; 0 of a lateness.
    """

    quantity: str
    value: float
    usual: float

    @property
    def text(self) -> str:
        """The deviation in words."""
        kind = next(kind for kind in QUANTITIES if kind.name == self.quantity)
        if kind.within_host:
            return f"{kind.label} {kind.text(self.value)} later"
        share = f" ({100 * (self.value / self.usual - 1):+.0f} %)" if self.usual else ""
        return f"{kind.label} {kind.text(self.value)}, usual {kind.text(self.usual)}{share}"


@dataclass(frozen=True)
class RankDifference:
    """A rank that differs from the others, or a host whose ranks do so together.

    Attributes:
        ranks: The rank, or all ranks of the host.
        host: Their host; None where not recorded.
        is_host: Whether the host differs as a whole.
        cause: What explains the difference: `slow link`, `slow clock`, `slow forward` and so on, `late forward` and so
            on, `time without a phase`, `slow iteration` or `less free memory`.
        deviations: The quantities, the cause first.
        facts: What is recorded of the rank's process and device and unlike most ranks.
    """

    ranks: tuple[int, ...]
    host: str | None
    is_host: bool
    cause: str
    deviations: tuple[Deviation, ...]
    facts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The rank or the host, for people."""
        return f"host {self.host}" if self.is_host else f"rank {self.ranks[0]}"

    @property
    def extra_ms(self) -> float:
        """Milliseconds by which its phases take longer."""
        longer = [d.value - d.usual for d in self.deviations if d.quantity in ("forward_ms", "backward_ms", "update_ms")]
        return float(sum(longer))


@dataclass(frozen=True)
class RankDifferences:
    """The ranks of a trace that differ from the others.

    Attributes:
        compared: Number of ranks that were compared; 0 where the trace has one rank, or fewer than 5 steady iterations.
        hosts: Number of hosts that are recorded.
        differences: Hosts, then ranks, those whose phases take longest first.
    """

    compared: int
    hosts: int
    differences: tuple[RankDifference, ...]

    @property
    def ranks(self) -> list[int]:
        """The ranks that differ, also with their host."""
        return sorted({rank for difference in self.differences for rank in difference.ranks})

    def as_json(self) -> list[dict[str, Any]] | None:
        """Return the value of `rank_differences` in JSON; None where ranks were not compared."""
        return [asdict(difference) for difference in self.differences] if self.compared else None

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per rank or host, with the fields of `RankDifference` as columns."""
        return to_frame(self.differences, RankDifference)


@once_per_trace
def rank_differences(trace: Trace) -> RankDifferences:
    """Compare the ranks of a trace by the quantities of `Deviation`.

    In each iteration the median of all ranks is subtracted, so that what all ranks have in common cancels. The median of
    these differences over the steady iterations is what a rank is judged by: see `stands_out`. Where several hosts are
    recorded, hosts are compared first; the ranks of a host that differs as a whole are then compared with each other.
    """
    numbers = steady_iterations(trace).numbers
    if len(trace.ranks) < 2 or len(numbers) < MIN_ITERATIONS:
        return RankDifferences(0, 0, ())
    hosts = np.array([trace.rank(rank).host or "" for rank in trace.ranks])
    tables = {rank: rank_series(trace, rank) for rank in trace.ranks}
    iteration_ms = float(np.nanmedian([table["iteration_ms"].median() for table in tables.values()]))
    found: dict[tuple[int, ...], list[Deviation]] = {}
    for quantity in QUANTITIES:
        values = np.stack([table[quantity.column].to_numpy(np.float64) for table in tables.values()])
        values[np.isnan(values).sum(axis=1) > len(numbers) - MIN_ITERATIONS] = np.nan
        comparison = _compare(trace, quantity, values, hosts, iteration_ms)
        if comparison is None:
            continue
        if quantity.name in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
            column = quantity.name.replace("_per_s", "")
            moved = np.array([table[column].median() for table in tables.values()])
            comparison.ranks &= moved >= quantities.MIN_BYTES_SHARE * np.nanmedian(moved)
        for members, deviation in comparison.deviations(trace, quantity, hosts):
            found.setdefault(members, []).append(deviation)
    differences = [_difference(trace, members, deviations, hosts) for members, deviations in found.items()]
    differences.sort(key=lambda difference: (not difference.is_host, -difference.extra_ms, difference.ranks))
    return RankDifferences(len(trace.ranks), len(set(hosts) - {""}), tuple(differences))


@dataclass
class _Comparison:
    """The result of comparing ranks by one quantity: medians of ranks, and which ranks and hosts differ."""

    medians: Floats
    usual: float
    ranks: npt.NDArray[np.bool_]
    hosts: list[str]

    def deviations(
        self, trace: Trace, quantity: Quantity, hosts: npt.NDArray[np.str_]
    ) -> list[tuple[tuple[int, ...], Deviation]]:
        """Return the ranks that differ, a tuple of several for a host, each with its deviation."""
        numbers = np.array(trace.ranks)
        groups = [hosts == host for host in self.hosts]
        groups += [np.arange(len(numbers)) == index for index in np.flatnonzero(self.ranks)]
        return [
            (
                tuple(map(int, numbers[group])),
                Deviation(quantity.name, float(np.nanmedian(self.medians[group])), self.usual),
            )
            for group in groups
        ]


def _compare(
    trace: Trace, quantity: Quantity, values: Floats, hosts: npt.NDArray[np.str_], iteration_ms: float
) -> _Comparison | None:
    """Compare ranks by one quantity: a row of values per rank, a column per iteration. None where too few have it."""
    recorded = ~np.isnan(values).all(axis=1)
    if recorded.sum() < 2:
        return None
    centered = _centered(values, hosts if quantity.within_host else np.zeros(len(values)))
    worse = centered if quantity.higher_is_worse else -centered
    excess, errors = _row_medians(worse), median_errors(worse)
    medians = excess if quantity.within_host else _row_medians(values)
    usual = 0.0 if quantity.within_host else float(np.nanmedian(medians))
    limit = _limit(trace, quantity, usual, iteration_ms)
    odd_hosts = [] if quantity.within_host else _odd_hosts(excess, errors, hosts, limit)
    for host in odd_hosts:
        # Its ranks are compared with each other.
        excess = np.where(hosts == host, excess - np.nanmedian(excess[hosts == host]), excess)
    return _Comparison(medians, usual, stands_out(excess, errors, limit), odd_hosts)


def _centered(values: Floats, groups: npt.NDArray[Any]) -> Floats:
    """Subtract in each column the median of the group's rows; NaN in groups of one row."""
    result = np.full_like(values, np.nan)
    for group in np.unique(groups):
        rows = values[groups == group]
        known = ~np.isnan(rows)
        if len(rows) > 1 and known.any():
            columns = known.sum(axis=0) > 1
            result[np.ix_(groups == group, columns)] = rows[:, columns] - np.nanmedian(rows[:, columns], axis=0)
    return result


def _odd_hosts(excess: Floats, errors: Floats, hosts: npt.NDArray[np.str_], limit: float) -> list[str]:
    """Return the hosts with several ranks that differ as a whole."""
    names = [str(host) for host in np.unique(hosts) if host and (hosts == host).sum() > 1]
    names = [host for host in names if not np.isnan(excess[hosts == host]).all()]
    if len(names) < 2:
        return []
    medians = np.array([np.nanmedian(excess[hosts == host]) for host in names])
    host_errors = np.array([np.nanmedian(errors[hosts == host]) for host in names])
    found = stands_out(medians, host_errors, limit)
    usual = float(np.median(medians[~found])) if (~found).any() else 0.0
    shares = np.array([np.mean(excess[hosts == host] - usual >= limit) for host in names])
    return [host for host, is_odd, share in zip(names, found, shares, strict=True) if is_odd and share >= _HOST_SHARE]


def _limit(trace: Trace, quantity: Quantity, usual: float, iteration_ms: float) -> float:
    """Return the smallest difference of a quantity that is reported."""
    if quantity.name == "free_bytes":
        return quantities.MIN_CAPACITY_SHARE * float(capacity_bytes(trace, trace.ranks[0]) or 0)
    if quantity.name == "sm_clock_mhz":
        return quantities.MIN_CLOCK_SHARE * usual
    if not quantity.higher_is_worse:
        return quantities.MIN_RATE_SHARE * usual
    least = quantities.MIN_ITERATION_SHARE * iteration_ms
    return max(least, quantities.MIN_LATE_MS if quantity.within_host else quantities.MIN_PHASE_SHARE * usual)


def _row_medians(rows: Floats) -> Floats:
    medians = np.full(len(rows), np.nan)
    known = ~np.isnan(rows).all(axis=1)
    medians[known] = np.nanmedian(rows[known], axis=1)
    return medians


def _difference(
    trace: Trace, members: tuple[int, ...], deviations: Sequence[Deviation], hosts: npt.NDArray[np.str_]
) -> RankDifference:
    kinds = {kind.name: kind for kind in QUANTITIES}
    facts = [unusual_facts(trace, rank) for rank in members]
    # Of a host, what all of its ranks have in common.
    common = tuple(fact for fact in facts[0] if all(fact in others for others in facts))
    host = trace.rank(members[0]).host
    return RankDifference(members, host, len(members) > 1, kinds[deviations[0].quantity].cause, tuple(deviations), common)
