"""Finds memory that torch has reserved and no tensor uses: fragmented, or kept in the allocator's cache."""

from __future__ import annotations

import numpy as np

from ebbtide.analysis.findings.common import record_memory, scope_text
from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.analysis.metrics.memory import difference
from ebbtide.analysis.metrics.memory_spans import memory_spans
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.analysis.timeseries.step_functions import Ints, peak_between
from ebbtide.phases import UPDATE
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text

# Less than this, or less than this share of the device, is not reported.
_MIN_BYTES = 2**30
_MIN_SHARE = 0.05


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Check the gap `fragmentation`: `reserved` minus `allocated`, over the iteration, or over a trace without any.

    Where state is offloaded only the update counts: torch keeps room for activations then, which the next forward uses.
    The memory counts as fragmented only where torch reserved more although tensors never filled what it had
    (`needless_growth`). Else it is the allocator's cache, which other settings of the allocator do not shrink.
    """
    if not metrics.has_gpu:
        return None
    phase = UPDATE if metrics.offloaded and metrics.iteration_ms is not None else None
    gaps, capacity = _gaps(metrics, phase), metrics.capacity_bytes
    if not gaps or capacity is None:
        return Unknown(
            "fragmentation",
            "how much of what torch has reserved holds no tensor?",
            "record with `ebbtide profile`; a monitor file alone does not have torch's counts"
            if not gaps
            else record_memory(metrics),
        )
    limit = max(_MIN_BYTES, _MIN_SHARE * capacity)
    largest = max(gaps)
    if largest < limit:
        return None
    measured = (
        f"{scope_text(metrics, phase)} never less than {bytes_text(largest)} of {bytes_text(capacity)} is reserved "
        "without holding a tensor"
    )
    grown = max(needless_growth(metrics.trace, rank) for rank in metrics.trace.ranks)
    if grown >= limit:
        return Finding(
            "fragmentation",
            "Torch's memory is fragmented",
            None,
            (measured, f"torch reserved {bytes_text(grown)} more although tensors never filled what it had before"),
            "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    return Finding(
        "fragmentation",
        "Torch has reserved memory that no tensor holds",
        None,
        (measured, "torch did not reserve more beside it: it is the allocator's cache, and nothing shows fragments"),
        "torch.cuda.empty_cache() before the update frees it for the state"
        if phase
        else "torch.cuda.empty_cache() after what needed it (start-up, evaluation) gives it back to the device; torch "
        "itself would use it for a larger batch",
    )


def needless_growth(trace: Trace, rank: int) -> int:
    """Return the bytes by which `reserved` grew although tensors did not fill what was reserved before.

    A growth from r to r' counts if `allocated` stays at r or below until `reserved` changes again: what torch asked the
    device for would have fitted into what it had, had that been in one piece. The first memory that is reserved, and
    growth for a short-lived tensor that fills it, do not count.
    """
    spans = memory_spans(trace, rank, "reserved")
    if spans is None:
        return _needless_growth(memory_timeline(trace, rank, "reserved"), _tensors(trace, rank))
    return sum(
        _needless_growth(
            _between(memory_timeline(trace, rank, "reserved"), start, end), _between(_tensors(trace, rank), start, end)
        )
        for start, end in zip(*spans, strict=True)
    )


def _between(timeline: tuple[Ints, Ints], start: int, end: int) -> tuple[Ints, Ints]:
    times, sizes = timeline
    inside = (times >= start) & (times <= end)
    return times[inside], sizes[inside]


def _needless_growth(reserved_timeline: tuple[Ints, Ints], tensor_timeline: tuple[Ints, Ints]) -> int:
    times, reserved = reserved_timeline
    tensor_times, tensors = tensor_timeline
    if len(reserved) < 2 or not len(tensors):
        return 0
    changes = np.flatnonzero(np.diff(reserved, prepend=-1))
    times, reserved = times[changes], reserved[changes]
    ends = np.append(times[1:] - 1, max(int(tensor_times[-1]), int(times[-1])))
    filled = peak_between(tensor_times, tensors, times, ends)[1:]
    before, growth = reserved[:-1], np.diff(reserved)
    return int(growth[(growth > 0) & (before > 0) & (filled <= before)].sum())


def _gaps(metrics: TraceMetrics, phase: str | None) -> list[int]:
    """Return the smallest gap of each rank with one. Of a memory snapshot, `requested` stands in for `allocated`."""
    gaps = metrics.min_gap_bytes("fragmentation", phase)
    if gaps or metrics.iteration_ms is not None:
        return gaps
    for rank in metrics.trace.ranks:
        reserved, tensors = memory_timeline(metrics.trace, rank, "reserved"), _tensors(metrics.trace, rank)
        if len(reserved[0]) and len(tensors[0]):
            gaps.append(int(difference(reserved, tensors)[1].min()))
    return gaps


def _tensors(trace: Trace, rank: int) -> tuple[Ints, Ints]:
    """Return (times ns, bytes) of the blocks of tensors, or of what they requested where blocks were not recorded."""
    allocated = memory_timeline(trace, rank, "allocated")
    return allocated if len(allocated[0]) else memory_timeline(trace, rank, "requested")
