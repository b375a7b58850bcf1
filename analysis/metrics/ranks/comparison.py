"""Finds the ranks, or whole hosts, that differ from the others, and the causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, first_device
from ebbtide.analysis.metrics.iterations import IterationTable, steady_iterations
from ebbtide.analysis.metrics.ranks.rank_series import (
    centered_rows,
    hosts_of,
    rank_series,
    row_medians,
)
from ebbtide.analysis.timeseries.statistics import (
    median_errors,
    median_or_none,
    stands_out,
)
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, ms_text, rate_text

# Of an iteration and of the phase; bytes as a share of the capacity.
MIN_ITERATION_SHARE = 0.02
MIN_PHASE_SHARE = 0.02
MIN_LATE_MS = 1.0
MIN_RATE_SHARE = 0.1
MIN_CLOCK_SHARE = 0.05
MIN_CAPACITY_SHARE = 0.01
# A lower rate of a rank that also moves fewer bytes says nothing about its link.
MIN_BYTES_SHARE = 0.9


@dataclass(frozen=True)
class RankQuantity:
    """A quantity that ranks are compared by."""

    name: str  # Its name in JSON.
    label: str  # Its name for people.
    cause: str  # The cause of a difference, as in `slow link`.
    higher_is_worse: bool  # Whether a higher value is worse.
    text: Callable[[float], str]  # A function from a value to text with its unit.
    # Whether only ranks of one host are compared, which share a clock.
    within_host: bool = False

    @property
    def column(self) -> str:
        """The column of `rank_series`."""
        return self.name.replace("_late_ms", "_start_ms")

    @property
    def bytes_column(self) -> str | None:
        """The column of the bytes that a rate is of; None for other quantities."""
        return (
            self.name.removesuffix("_per_s")
            if self.name.endswith("_bytes_per_s")
            else None
        )


# In the order in which they explain a difference: a slow link makes phases slow, a slow
# phase makes the next one late. Time without a phase is none of them: it is long on
# ranks that wait for another one. What delays a rank outside its phases makes its next
# phase late.
QUANTITIES: tuple[RankQuantity, ...] = (
    RankQuantity("h2d_bytes_per_s", "h2d rate", "slow link", False, rate_text),
    RankQuantity("d2h_bytes_per_s", "d2h rate", "slow link", False, rate_text),
    RankQuantity(
        "sm_clock_mhz",
        "SM clock",
        "slow clock",
        False,
        lambda megahertz: f"{megahertz:,.0f} MHz",
    ),
    *(
        RankQuantity(f"{phase}_ms", phase, f"slow {phase}", True, ms_text)
        for phase in PHASES
    ),
    RankQuantity("phases_ms", "all phases", "slow phases", True, ms_text),
    *(
        RankQuantity(
            f"{phase}_late_ms",
            f"start of {phase}",
            f"late {phase}",
            True,
            ms_text,
            True,
        )
        for phase in PHASES
    ),
    RankQuantity("iteration_ms", "iteration", "slow iteration", True, ms_text),
    RankQuantity(
        "free_bytes", "least free memory", "less free memory", False, bytes_text
    ),
)
_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}


@dataclass(frozen=True)
class Deviation:
    """A quantity in which a rank differs."""

    # `forward_ms` and so on, `phases_ms` (their sum), `iteration_ms`; `forward_late_ms`
    # and so on, by which a phase begins later than on the median rank of the host;
    # `h2d_bytes_per_s` and `d2h_bytes_per_s`, the rate of copies while they run, or the
    # highest sampled rate of an iteration; `free_bytes`, the least of an iteration;
    # `sm_clock_mhz`, of the busy GPU.
    quantity: str
    value: float  # Median over the steady iterations; of a host, of its ranks.
    # The same of the median rank, of two ranks of the better one; 0 of a lateness.
    usual: float

    @property
    def text(self) -> str:
        """The deviation in words."""
        kind = _BY_NAME[self.quantity]
        if kind.within_host:
            return f"{kind.label} {kind.text(self.value)} later"
        share = f" ({100 * (self.value / self.usual - 1):+.0f} %)" if self.usual else ""
        return (
            f"{kind.label} {kind.text(self.value)}, usual "
            f"{kind.text(self.usual)}{share}"
        )


@dataclass(frozen=True)
class RankDifference:
    """A rank that differs from the others, or a host whose ranks do so together."""

    ranks: tuple[int, ...]  # The rank, or all ranks of the host.
    host: str | None  # Their host; None where not recorded.
    is_host: bool  # Whether the host differs as a whole.
    # What explains the difference: `slow link`, `slow clock`, `slow forward` and so on,
    # `late forward` and so on, `slow phases`, `slow iteration` or `less free memory`.
    cause: str
    deviations: tuple[Deviation, ...]  # The quantities, the cause first.
    # What is recorded of the rank's process and device and unlike most ranks.
    facts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The rank or the host, for people."""
        return f"host {self.host}" if self.is_host else f"rank {self.ranks[0]}"

    @property
    def extra_ms(self) -> float:
        """Milliseconds by which its phases take longer."""
        longer = {d.quantity: d.value - d.usual for d in self.deviations}
        return longer.get(
            "phases_ms", sum(longer.get(f"{phase}_ms", 0.0) for phase in PHASES)
        )


@dataclass(frozen=True, repr=False)
class RankDifferences(TabularResult, table="differences"):
    """The ranks of a trace that differ from the others."""

    # Number of ranks that were compared; 0 where the trace has one rank, or fewer than
    # 5 steady iterations.
    compared: int
    hosts: int  # Number of hosts that are recorded.
    # Hosts, then ranks, those whose phases take longest first.
    differences: tuple[RankDifference, ...]

    @property
    def ranks(self) -> list[int]:
        """The ranks that differ, also with their host."""
        return sorted(
            {rank for difference in self.differences for rank in difference.ranks}
        )

    def as_json(self) -> list[dict[str, Any]] | None:
        """Return the value of `rank_differences` in JSON; None where ranks were not
        compared."""
        return (
            [asdict(difference) for difference in self.differences]
            if self.compared
            else None
        )


# Of a trace with one rank, or with fewer than 5 steady iterations.
NOT_COMPARED = RankDifferences(0, 0, ())


# With fewer iterations noise cannot be told from a difference.
MIN_ITERATIONS = 5
# Of a host that differs as a whole, at least this share of the ranks does.
_HOST_SHARE = 0.75
# A value is the usual one if more than this share of the ranks has it.
_USUAL_SHARE = 0.5


@once_per_trace
def rank_differences(trace: Trace) -> RankDifferences:
    """Compare the ranks of a trace by the quantities of `Deviation`. In each iteration
    the median of all ranks is subtracted; a rank is judged by the median of these
    differences (`stands_out`). Where several hosts are recorded, these are compared
    first, then the ranks of a host that differs as a whole with each other."""
    numbers = steady_iterations(trace).numbers
    if len(trace.ranks) < 2 or len(numbers) < MIN_ITERATIONS:
        return NOT_COMPARED
    hosts = hosts_of(trace)
    tables = [rank_series(trace, rank) for rank in trace.ranks]
    medians = np.array(
        [median_or_none(table.columns["iteration_ms"]) for table in tables], np.float64
    )
    if np.isnan(medians).all():
        return NOT_COMPARED
    iteration_ms = float(np.nanmedian(medians))
    deviating: dict[tuple[int, ...], list[Deviation]] = {}
    for quantity in QUANTITIES:
        for members, deviation in _deviations(
            trace, quantity, _values(tables, quantity), hosts, iteration_ms
        ):
            deviating.setdefault(members, []).append(deviation)
    differences = [
        _difference(trace, members, deviations)
        for members, deviations in deviating.items()
    ]
    differences.sort(
        key=lambda difference: (
            not difference.is_host,
            -difference.extra_ms,
            difference.ranks,
        )
    )
    return RankDifferences(len(trace.ranks), len(set(hosts) - {""}), tuple(differences))


def _values(tables: Sequence[IterationTable], quantity: RankQuantity) -> Floats:
    """Return a row of values per rank and a column per iteration, NaN for ranks that
    are not compared."""
    values = np.stack([table.columns[quantity.column] for table in tables])
    values[(~np.isnan(values)).sum(axis=1) < MIN_ITERATIONS] = np.nan
    recorded = ~np.isnan(values).all(axis=1)
    if quantity.bytes_column is not None and recorded.any():
        moved = np.array(
            [median_or_none(table.columns[quantity.bytes_column]) for table in tables],
            np.float64,
        )
        values[~(moved >= MIN_BYTES_SHARE * np.nanmedian(moved[recorded]))] = np.nan
    return values


def _deviations(
    trace: Trace,
    quantity: RankQuantity,
    values: Floats,
    hosts: npt.NDArray[np.str_],
    iteration_ms: float,
) -> Iterator[tuple[tuple[int, ...], Deviation]]:
    """Compare ranks by one quantity: a row of values per rank, a column per iteration.
    Yield the rank, or the ranks of a host, that differ, with the deviation."""
    recorded = ~np.isnan(values).all(axis=1)
    if recorded.sum() < 2:
        return
    # Of two ranks of a host the earlier one is on time.
    groups, of_pairs = (
        (hosts, np.nanmin)
        if quantity.within_host
        else (np.zeros(len(values)), np.nanmedian)
    )
    centered = centered_rows(values, groups, of_pairs)
    worse = centered if quantity.higher_is_worse else -centered
    excess, errors = row_medians(worse), median_errors(worse)
    medians, usual = excess, 0.0
    if not quantity.within_host:
        medians, better = (
            row_medians(values),
            np.min if quantity.higher_is_worse else np.max,
        )
        usual = float((better if recorded.sum() == 2 else np.median)(medians[recorded]))
    limit = _limit(trace, quantity, usual, iteration_ms)
    odd_hosts = [] if quantity.within_host else _odd_hosts(excess, errors, hosts, limit)
    for host in odd_hosts:
        # Its ranks are compared with each other.
        excess = np.where(
            hosts == host, excess - np.nanmedian(excess[hosts == host]), excess
        )
    differing = [hosts == host for host in odd_hosts]
    differing += [
        np.arange(len(hosts)) == index
        for index in np.flatnonzero(stands_out(excess, errors, limit))
    ]
    for group in differing:
        members = tuple(np.array(trace.ranks)[group].tolist())
        yield (
            members,
            Deviation(quantity.name, float(np.nanmedian(medians[group])), usual),
        )


def _odd_hosts(
    excess: Floats, errors: Floats, hosts: npt.NDArray[np.str_], limit: float
) -> list[str]:
    """Return the hosts with several ranks that differ as a whole."""
    names = [
        str(host) for host in np.unique(hosts) if host and (hosts == host).sum() > 1
    ]
    names = [host for host in names if not np.isnan(excess[hosts == host]).all()]
    if len(names) < 2:
        return []
    medians = np.array([np.nanmedian(excess[hosts == host]) for host in names])
    host_errors = np.array([np.nanmedian(errors[hosts == host]) for host in names])
    deviating = stands_out(medians, host_errors, limit)
    usual = float(np.median(medians[~deviating])) if (~deviating).any() else 0.0
    shares = np.array(
        [np.mean(excess[hosts == host] - usual >= limit) for host in names]
    )
    return [
        host
        for host, is_odd, share in zip(names, deviating, shares, strict=True)
        if is_odd and share >= _HOST_SHARE
    ]


def _limit(
    trace: Trace, quantity: RankQuantity, usual: float, iteration_ms: float
) -> float:
    """Return the smallest difference of a quantity that is reported."""
    if quantity.name == "free_bytes":
        return MIN_CAPACITY_SHARE * float(capacity_bytes(trace, trace.ranks[0]) or 0)
    if quantity.name == "sm_clock_mhz":
        return MIN_CLOCK_SHARE * usual
    if not quantity.higher_is_worse:
        return MIN_RATE_SHARE * usual
    least = MIN_ITERATION_SHARE * iteration_ms
    return max(least, MIN_LATE_MS if quantity.within_host else MIN_PHASE_SHARE * usual)


def _difference(
    trace: Trace, members: tuple[int, ...], deviations: Sequence[Deviation]
) -> RankDifference:
    facts = [unusual_facts(trace, rank) for rank in members]
    # Of a host, what all of its ranks have in common.
    common = tuple(fact for fact in facts[0] if all(fact in others for others in facts))
    host, cause = trace.rank(members[0]).host, _BY_NAME[deviations[0].quantity].cause
    return RankDifference(
        members, host, len(members) > 1, cause, tuple(deviations), common
    )


def unusual_facts(trace: Trace, rank: int) -> tuple[str, ...]:
    """Return the facts in which a rank is unlike more than half of the ranks.

    An example is `link lanes 8 (usual: 16)`.
    """
    usual = _usual_facts(trace)
    own = _facts(trace, rank)
    return tuple(
        f"{name} {own[name]} (usual: {usual[name]})"
        for name in own
        if own[name] != usual.get(name, own[name])
    )


@once_per_trace
def _usual_facts(trace: Trace) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for rank in trace.ranks:
        for name, value in _facts(trace, rank).items():
            counts.setdefault(name, Counter())[value] += 1
    most = {name: values.most_common(1)[0] for name, values in counts.items()}
    return {
        name: value
        for name, (value, count) in most.items()
        if count > _USUAL_SHARE * len(trace.ranks)
    }


def _facts(trace: Trace, rank: int) -> dict[str, str]:
    entry, device = trace.rank(rank), first_device(trace, rank)
    cores = entry.numa.cpu_nodes if entry.numa is not None else ()
    on_gpu_node = (
        None if device.numa_node is None or not cores else device.numa_node in cores
    )
    facts = {
        "device": device.name,
        "device memory": None
        if device.capacity_bytes is None
        else bytes_text(device.capacity_bytes),
        "link lanes": device.link.width,
        "link generation": device.link.generation,
        "driver": device.driver,
        "cores on the GPU's NUMA node": None
        if on_gpu_node is None
        else ("yes" if on_gpu_node else "no"),
        "threads": entry.threads.torch,
        "torch": entry.torch,
        "parameters": entry.model.params,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}
