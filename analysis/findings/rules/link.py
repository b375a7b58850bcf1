"""Rules on copies over the link."""

from itertools import product

import numpy as np

from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.findings.needs import (
    GPU,
    ITERATIONS,
    MIN_SHARE,
    RANKS,
    RECORD_COPIES,
)
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link import SteadyCopies
from ebbtide.analysis.metrics.link_throughput import (
    DIRECTIONS,
    copied_iterations,
    covering,
)
from ebbtide.analysis.timeseries.step_functions import Floats, union, union_length
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import bytes_text, ms_text, rate_text

# Smaller copies take as long as their calls, from any memory.
_SMALL_COPY_BYTES = 64 << 10
_QUESTION = "are copies made from pinned or from pageable memory?"


@rule("pageable-copies", ITERATIONS, GPU)
def pageable_copies(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare pageable copies with the rate of pinned ones in the same direction, else
    with the link's peak."""
    if not metrics.has_copies:
        return pageable_copies.unknown(_QUESTION, RECORD_COPIES)
    kinds = {*metrics.steady_copies.copies.host_memory}
    if kinds == {None}:
        record = (
            "the copies of this trace do not state their kind of memory: "
            + RECORD_COPIES
        )
        return pageable_copies.unknown(_QUESTION, record)
    gains: list[float] = []
    cost = 0.0
    evidence = []
    for direction in DIRECTIONS:
        pageable, pinned = (
            metrics.copy_stats(direction, kind) for kind in ("pageable", "pinned")
        )
        if pageable is None or pageable.bytes is None or pageable.busy_ms <= 0:
            continue
        if pageable.bytes < _SMALL_COPY_BYTES * pageable.count:
            continue
        rate = pageable.bytes / pageable.busy_ms * 1e3
        fast = (
            pinned.bytes / pinned.busy_ms * 1e3
            if pinned and pinned.bytes and pinned.busy_ms
            else None
        )
        fast = fast if fast is not None and fast > rate else metrics.peak_bytes_per_s
        if fast is not None:
            gains.append(clamp_gain(pageable.busy_ms * (1 - rate / fast)))
        cost += gains[-1] if fast is not None else pageable.busy_ms
        comparison = (
            f"; pinned ones could run at {rate_text(fast)}"
            if fast is not None and fast > rate
            else ""
        )
        evidence.append(
            f"{direction}: {pageable.count:,} pageable copies per iteration, "
            f"{bytes_text(pageable.bytes)} in "
            f"{ms_text(pageable.busy_ms)} ({rate_text(rate)}{comparison})"
        )
    if not evidence or cost < MIN_SHARE * (metrics.iteration_ms or 0.0):
        return None
    return pageable_copies.finding(
        "Copies go through pageable host memory",
        clamp_gain(sum(gains)) if gains else None,
        evidence,
        "keep what is copied in pinned memory (pin_memory=True, "
        "offload_optimizer.pin_memory)",
    )


@rule("one-direction", ITERATIONS, GPU)
def one_direction(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare the overlap of the two directions with the largest possible, of the rank
    where they differ most."""
    if not metrics.has_copies:
        return one_direction.unknown(
            "do copies of both directions run at once or take turns?", RECORD_COPIES
        )
    total = 0.0
    evidence = []
    for phase in ITERATION_PARTS:
        busy = [
            (up.busy_ms, down.busy_ms, up.both_ms)
            for up, down in metrics.both_directions(phase)
            if up.busy_ms is not None
            and down.busy_ms is not None
            and up.both_ms is not None
        ]
        h2d, d2h, both = max(
            busy, key=lambda ms: min(ms[:2]) - ms[2], default=(0.0, 0.0, 0.0)
        )
        gain = min(h2d, d2h) - both
        if gain >= MIN_SHARE * (metrics.iteration_ms or 0.0):
            total += gain
            evidence.append(
                f"{phase}: h2d busy {ms_text(h2d)}, d2h busy {ms_text(d2h)}, both at "
                f"once {ms_text(both)}"
            )
    if not evidence:
        return None
    return one_direction.finding(
        "Copies of the two directions take turns",
        clamp_gain(total),
        evidence,
        "put h2d and d2h copies on streams of their own, so that they overlap",
    )


# Copies of at least this size measure a link's rate; smaller ones mostly take
# the time of a launch.
_LARGE_BYTES = 1 << 20
# Ranks share a link if their copies run this many times faster alone than together with
# another rank's.
_MIN_SLOWDOWN = 1.4
# Of a copy's time in which another rank copies: more counts as together, less as alone.
_TOGETHER_SHARE = 0.5
_ALONE_SHARE = 0.1
_MIN_COPIES = 3


@rule("shared-link", GPU, RANKS)
def shared_link(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare the rates of large copies that overlap another rank's copies with those
    that do not."""
    recorded = [
        rank
        for rank in metrics.trace.ranks
        if metrics.trace.rank(rank).transfers_recorded
    ]
    if len(recorded) < 2:
        return shared_link.unknown(
            "do ranks share a link?", RECORD_COPIES + ", on every rank"
        )
    gain = 0.0
    evidence = []
    large, shares = _large_copies(metrics)
    rates = large.copies.bytes / (large.copies.ends - large.copies.starts) * 1e9
    kinds = sorted({*large.copies.host_memory}, key=lambda kind: kind or "")
    for direction, kind in product(sorted(DIRECTIONS), kinds):
        own = (large.copies.directions == direction) & (
            large.copies.host_memory == kind
        )
        together, alone = (
            own & (shares > _TOGETHER_SHARE),
            own & (shares < _ALONE_SHARE),
        )
        if together.sum() < _MIN_COPIES or alone.sum() < _MIN_COPIES:
            continue
        slow, fast = float(np.median(rates[together])), float(np.median(rates[alone]))
        if fast > _MIN_SLOWDOWN * slow:
            lengths = [
                union_length(copies.starts, copies.ends)
                / 1e6
                / len(copied_iterations(metrics.trace, rank))
                for rank, copies in large.only(together).by_rank()
            ]
            gain += max(lengths) * (1 - slow / fast)
            evidence.append(
                f"{direction}: {kind or 'all'} copies run at {rate_text(fast)} alone "
                f"and at {rate_text(slow)} together "
                f"with another rank's ({int(alone.sum()):,} and "
                f"{int(together.sum()):,} copies of 1 MiB or more)"
            )
    if not evidence:
        return None
    return shared_link.finding(
        "Ranks share a link",
        clamp_gain(gain),
        evidence,
        "spread the ranks over PCIe switches and sockets (nvidia-smi topo -m), or let "
        "them copy at different times",
    )


def _large_copies(metrics: JobMetrics) -> tuple[SteadyCopies, Floats]:
    """Return large copies, and for each the share of it during which another rank of
    the host copied in the same direction."""
    rows = metrics.steady_copies
    rows = rows.only(
        (rows.copies.bytes >= _LARGE_BYTES) & (rows.copies.ends > rows.copies.starts)
    )
    starts, ends = rows.copies.starts, rows.copies.ends
    hosts = {rank: metrics.trace.rank(rank).host or "" for rank in metrics.trace.ranks}
    host_of_row, shares = (
        np.array([hosts[rank] for rank in rows.ranks.tolist()], str),
        np.zeros(len(starts)),
    )
    for host, direction in product(sorted({*hosts.values()}), DIRECTIONS):
        of_host = np.flatnonzero(
            (host_of_row == host) & (rows.copies.directions == direction)
        )
        for rank in np.unique(rows.ranks[of_host]):
            is_own = rows.ranks[of_host] == rank
            own, others = of_host[is_own], of_host[~is_own]
            busy = covering(*union(starts[others], ends[others]))
            shares[own] = (busy(ends[own]) - busy(starts[own])) / (
                ends[own] - starts[own]
            )
    return rows, shares
