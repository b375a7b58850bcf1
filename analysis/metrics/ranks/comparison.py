"""Finds the ranks, or whole hosts, that differ from the others, and the causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, first_device
from ebbtide.analysis.metrics.iteration_table import IterationTable
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.ranks.differences import (
    MIN_BYTES_SHARE,
    MIN_CAPACITY_SHARE,
    MIN_CLOCK_SHARE,
    MIN_ITERATION_SHARE,
    MIN_LATE_MS,
    MIN_PHASE_SHARE,
    MIN_RATE_SHARE,
    NOT_COMPARED,
    QUANTITIES,
    Deviation,
    RankDifference,
    RankDifferences,
    RankQuantity,
)
from ebbtide.analysis.metrics.ranks.rank_series import centered_rows, hosts_of, rank_series, row_medians
from ebbtide.analysis.timeseries.outlying import median_errors, stands_out
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text

# With fewer iterations noise cannot be told from a difference.
MIN_ITERATIONS = 5
# Of a host that differs as a whole, at least this share of the ranks does.
_HOST_SHARE = 0.75
# A value is the usual one if more than this share of the ranks has it.
_USUAL_SHARE = 0.5


@once_per_trace
def rank_differences(trace: Trace) -> RankDifferences:
    """Compare the ranks of a trace by the quantities of `Deviation`.

    In each iteration the median of all ranks is subtracted, so that what all ranks have in common cancels. A rank is
    judged by the median of these differences over the steady iterations: see `stands_out`. Where several hosts are
    recorded, hosts are compared first; the ranks of a host that differs as a whole are then compared with each other.
    """
    numbers = steady_iterations(trace).numbers
    if len(trace.ranks) < 2 or len(numbers) < MIN_ITERATIONS:
        return NOT_COMPARED
    hosts = hosts_of(trace)
    tables = [rank_series(trace, rank) for rank in trace.ranks]
    medians = np.array([median_or_none(table.columns["iteration_ms"]) for table in tables], np.float64)
    if np.isnan(medians).all():
        return NOT_COMPARED
    iteration_ms = float(np.nanmedian(medians))
    deviating: dict[tuple[int, ...], list[Deviation]] = {}
    for quantity in QUANTITIES:
        comparison = _compare(trace, quantity, _values(tables, quantity), hosts, iteration_ms)
        for members, deviation in comparison.deviations(trace, quantity, hosts) if comparison is not None else ():
            deviating.setdefault(members, []).append(deviation)
    differences = [_difference(trace, members, deviations) for members, deviations in deviating.items()]
    differences.sort(key=lambda difference: (not difference.is_host, -difference.extra_ms, difference.ranks))
    return RankDifferences(len(trace.ranks), len(set(hosts) - {""}), tuple(differences))


def _values(tables: Sequence[IterationTable], quantity: RankQuantity) -> Floats:
    """Return a row of values per rank, a column per iteration; NaN of ranks that are not compared."""
    values = np.stack([table.columns[quantity.column] for table in tables])
    values[(~np.isnan(values)).sum(axis=1) < MIN_ITERATIONS] = np.nan
    recorded = ~np.isnan(values).all(axis=1)
    if quantity.bytes_column is not None and recorded.any():
        moved = np.array([median_or_none(table.columns[quantity.bytes_column]) for table in tables], np.float64)
        values[~(moved >= MIN_BYTES_SHARE * np.nanmedian(moved[recorded]))] = np.nan
    return values


@dataclass(frozen=True)
class _Comparison:
    """The result of comparing ranks by one quantity: medians of ranks, and which ranks and hosts differ."""

    medians: Floats
    usual: float
    ranks: npt.NDArray[np.bool_]
    hosts: list[str]

    def deviations(
        self, trace: Trace, quantity: RankQuantity, hosts: npt.NDArray[np.str_]
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
    trace: Trace, quantity: RankQuantity, values: Floats, hosts: npt.NDArray[np.str_], iteration_ms: float
) -> _Comparison | None:
    """Compare ranks by one quantity: a row of values per rank, a column per iteration. None where too few have it."""
    recorded = ~np.isnan(values).all(axis=1)
    if recorded.sum() < 2:
        return None
    # Of two ranks of a host the earlier one is on time.
    groups, of_pairs = (hosts, np.nanmin) if quantity.within_host else (np.zeros(len(values)), np.nanmedian)
    centered = centered_rows(values, groups, of_pairs)
    worse = centered if quantity.higher_is_worse else -centered
    excess, errors = row_medians(worse), median_errors(worse)
    medians = excess if quantity.within_host else row_medians(values)
    usual = 0.0 if quantity.within_host else _usual(quantity, medians[recorded])
    limit = _limit(trace, quantity, usual, iteration_ms)
    odd_hosts = [] if quantity.within_host else _odd_hosts(excess, errors, hosts, limit)
    for host in odd_hosts:
        # Its ranks are compared with each other.
        excess = np.where(hosts == host, excess - np.nanmedian(excess[hosts == host]), excess)
    return _Comparison(medians, usual, stands_out(excess, errors, limit), odd_hosts)


def _usual(quantity: RankQuantity, medians: Floats) -> float:
    if len(medians) == 2:
        return float(np.min(medians) if quantity.higher_is_worse else np.max(medians))
    return float(np.median(medians))


def _odd_hosts(excess: Floats, errors: Floats, hosts: npt.NDArray[np.str_], limit: float) -> list[str]:
    """Return the hosts with several ranks that differ as a whole."""
    names = [str(host) for host in np.unique(hosts) if host and (hosts == host).sum() > 1]
    names = [host for host in names if not np.isnan(excess[hosts == host]).all()]
    if len(names) < 2:
        return []
    medians = np.array([np.nanmedian(excess[hosts == host]) for host in names])
    host_errors = np.array([np.nanmedian(errors[hosts == host]) for host in names])
    deviating = stands_out(medians, host_errors, limit)
    usual = float(np.median(medians[~deviating])) if (~deviating).any() else 0.0
    shares = np.array([np.mean(excess[hosts == host] - usual >= limit) for host in names])
    return [
        host for host, is_odd, share in zip(names, deviating, shares, strict=True) if is_odd and share >= _HOST_SHARE
    ]


def _limit(trace: Trace, quantity: RankQuantity, usual: float, iteration_ms: float) -> float:
    """Return the smallest difference of a quantity that is reported."""
    if quantity.name == "free_bytes":
        return MIN_CAPACITY_SHARE * float(capacity_bytes(trace, trace.ranks[0]) or 0)
    if quantity.name == "sm_clock_mhz":
        return MIN_CLOCK_SHARE * usual
    if not quantity.higher_is_worse:
        return MIN_RATE_SHARE * usual
    least = MIN_ITERATION_SHARE * iteration_ms
    return max(least, MIN_LATE_MS if quantity.within_host else MIN_PHASE_SHARE * usual)


def _difference(trace: Trace, members: tuple[int, ...], deviations: Sequence[Deviation]) -> RankDifference:
    kinds = {kind.name: kind for kind in QUANTITIES}
    facts = [unusual_facts(trace, rank) for rank in members]
    # Of a host, what all of its ranks have in common.
    common = tuple(fact for fact in facts[0] if all(fact in others for others in facts))
    host = trace.rank(members[0]).host
    return RankDifference(
        members, host, len(members) > 1, kinds[deviations[0].quantity].cause, tuple(deviations), common
    )


def unusual_facts(trace: Trace, rank: int) -> tuple[str, ...]:
    """Return the facts in which a rank is unlike more than half of the ranks, as in `link lanes 8 (usual: 16)`."""
    usual = _usual_facts(trace)
    own = _facts(trace, rank)
    return tuple(
        f"{name} {own[name]} (usual: {usual[name]})" for name in own if own[name] != usual.get(name, own[name])
    )


@once_per_trace
def _usual_facts(trace: Trace) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for rank in trace.ranks:
        for name, value in _facts(trace, rank).items():
            counts.setdefault(name, Counter())[value] += 1
    most = {name: values.most_common(1)[0] for name, values in counts.items()}
    return {name: value for name, (value, count) in most.items() if count > _USUAL_SHARE * len(trace.ranks)}


def _facts(trace: Trace, rank: int) -> dict[str, str]:
    """Return the facts of a rank that were recorded."""
    entry, device = trace.rank(rank), first_device(trace, rank)
    cores = entry.numa.cpu_nodes if entry.numa is not None else ()
    on_gpu_node = None if device.numa_node is None or not cores else device.numa_node in cores
    facts = {
        "device": device.name,
        "device memory": None if device.capacity_bytes is None else bytes_text(device.capacity_bytes),
        "link lanes": device.link.width,
        "link generation": device.link.generation,
        "driver": device.driver,
        "cores on the GPU's NUMA node": None if on_gpu_node is None else ("yes" if on_gpu_node else "no"),
        "threads": entry.threads.torch,
        "torch": entry.torch,
        "parameters": entry.model.params,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}
