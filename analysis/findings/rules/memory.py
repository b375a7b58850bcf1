"""Rules on device memory."""

import numpy as np

from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.findings.needs import (
    ALLOCATIONS,
    CHECKPOINTING,
    GPU,
    ITERATIONS,
    LAYERS,
    NO_CHECKPOINTING,
    UNIFIED,
    record_memory,
    scope_text,
)
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.memory import difference
from ebbtide.analysis.metrics.memory_spans import memory_spans
from ebbtide.analysis.metrics.recorded_free_memory import param_bytes, state_bytes
from ebbtide.analysis.metrics.static_split import largest_split
from ebbtide.analysis.timeseries.step_functions import Ints, peak_between
from ebbtide.machines.sheets import preset_of, system_memory_text
from ebbtide.phases import UPDATE
from ebbtide.profiler.trace import Trace
from ebbtide.state_bytes import MASTER_BYTES
from ebbtide.units import bytes_text, count_text


@rule("does-not-fit", GPU)
def does_not_fit(metrics: JobMetrics) -> Finding | None:
    """Compare the memory that the job needs with the capacity of the device."""
    free, capacity = metrics.always_free_bytes, metrics.capacity_bytes
    if free is None or capacity is None or free >= 0:
        return None
    return does_not_fit.finding(
        "The job does not fit into the device's memory",
        None,
        (
            f"it needs {bytes_text(capacity - free)} of the {bytes_text(capacity)} "
            "that it may use "
            f"({metrics.free_pool}): {bytes_text(-free)} are missing",
        ),
        f"`ebbtide plan {metrics.trace.path} --machine M` finds the least change with "
        "which it fits: offload, "
        "activation checkpointing, a smaller micro-batch, more ranks, another machine",
    )


# From here on copies within a memory are worth a line.
_MIN_COPIED_BYTES = 10_000_000


@rule("unified-memory", UNIFIED)
def unified_memory(metrics: JobMetrics) -> Finding:
    """Say what else takes of the memory that GPU and CPU share, and which copies move
    bytes within it."""
    device = metrics.by_rank[0].device
    sheet = preset_of(device.name)
    evidence = []
    if sheet is not None and sheet.system_gib:
        evidence.append(f"{device.name}: {system_memory_text(sheet)}")
    if metrics.always_free_bytes is None:
        evidence.append("the driver does not count what the job takes of it")
    for direction in DIRECTIONS:
        rows = [use for use in metrics.link().phases if use.direction == direction]
        copied = sum(use.bytes or 0.0 for use in rows if use.rank == rows[0].rank)
        if copied >= _MIN_COPIED_BYTES:
            evidence.append(
                f"copies {direction} move {bytes_text(copied)} within it "
                f"{scope_text(metrics)}"
            )
    return unified_memory.finding(
        "GPU and CPU share one memory, of which the system takes a part",
        None,
        evidence,
        "keep optimizer state and weights on the GPU: offload frees nothing, its "
        "copies buy nothing; `free -h` (available) tells what is left, and `echo 3 > "
        "/proc/sys/vm/drop_caches` frees the page cache, which CUDA counts as used",
    )


_MIN_FREE_BYTES = 2**30
# Without offloaded state: memory that is always free is reported from this share of the
# device on.
_UNUSED_SHARE = 0.25


@rule("free-memory", GPU)
def free_memory(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare the free memory with the offloaded state and its gradients, by the rules
    of `largest_split`; without iterations the free
    memory of the whole trace, and no gain.
    Only a split that was simulated is advised."""
    free, capacity = metrics.always_free_bytes, metrics.capacity_bytes
    if free is None or capacity is None:
        return free_memory.unknown(
            "how much device memory is free all the time?", record_memory(metrics)
        )
    moments = (
        "of every steady iteration"
        if metrics.iteration_ms is not None
        else "of the trace"
    )
    measured = (
        f"{bytes_text(free)} of {bytes_text(capacity)} are free at every moment "
        f"{moments} (capacity minus "
        f"{metrics.free_pool})"
    )
    update, offloaded = metrics.phase_ms(UPDATE), metrics.offloaded_params
    split = largest_split(metrics) if free >= _MIN_FREE_BYTES else None
    if split is not None and update and offloaded:
        state, gradient = (
            state_bytes(metrics.entry),
            param_bytes(metrics.entry) if split.ratio == 0 else MASTER_BYTES,
        )
        evidence = (
            measured,
            f"the optimizer state of {count_text(split.moved_params)} parameters "
            f"({state:g} B each, and {gradient:g} B "
            "of gradients) fits there permanently, "
            f"{100 * split.moved_params / offloaded:.0f} % of "
            "what this rank offloads",
        )
        estimate = clamp_gain(update * split.moved_params / offloaded)
        title = f"Optimizer state is offloaded, but {bytes_text(free)} are always free"
        if metrics.adviser is None or not metrics.adviser.can_simulate:
            return free_memory.finding(
                title, estimate, evidence, _simulate_text(metrics)
            )
        advice = metrics.adviser.split_advice()
        if advice is None:
            return None
        return free_memory.finding(
            title,
            estimate if advice.gain_ms is None else advice.gain_ms,
            evidence,
            advice.text,
            advice,
        )
    if free < _UNUSED_SHARE * capacity:
        return None
    return free_memory.finding(
        f"{bytes_text(free)} of device memory are free all the time",
        None,
        (measured,),
        "a larger batch, longer sequences or less recomputation would use it",
    )


def _simulate_text(metrics: JobMetrics) -> str:
    """Return the command that simulates static splits on a machine that is named."""
    return (
        f"`ebbtide replay {metrics.trace.path} --recommend --machine M` simulates "
        "whether a static split is faster "
        "(`ebbtide machines` lists machines, `ebbtide calibrate` measures yours)"
    )


# Of the recorded iteration: smaller gains of plans for layers were seldom measured
# (docs/validation.md).
_MIN_LAYER_GAIN = 0.06


@rule("recomputation", LAYERS, ITERATIONS, CHECKPOINTING)
def recomputation(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare the simulated iteration in which every layer is computed again with the
    best choice for each layer."""
    advice = (
        metrics.adviser.activations_advice() if metrics.adviser is not None else None
    )
    if advice is None or advice.gain_ms is None:
        return recomputation.unknown(
            "could activations be kept, or copied to the host, instead of computed "
            "again?",
            "a job whose layers are entries of a list of modules",
        )
    if advice.gain_ms < _MIN_LAYER_GAIN * (metrics.iteration_ms or 0.0):
        return None
    return recomputation.finding(
        "Activations are computed again that memory or the link would have room for",
        advice.gain_ms,
        (
            "simulated, with every layer computed again and with the best choice for "
            "each",
        ),
        advice.text,
        advice,
    )


@rule("activation-offload", LAYERS, ITERATIONS, NO_CHECKPOINTING)
def activation_offload(metrics: JobMetrics) -> Finding | None:
    """Compare the best choice for each layer with computing all again, of a job that
    does not fit with all kept."""
    free = metrics.always_free_bytes
    if free is None or free >= 0 or metrics.adviser is None:
        return None
    advice = metrics.adviser.activations_advice()
    if advice is None or advice.gain_ms is None or not advice.settings["offload"]:
        return None
    if advice.gain_ms < _MIN_LAYER_GAIN * advice.iteration_ms:
        return None
    return activation_offload.finding(
        "Activations do not fit, and offloading some of them costs less than "
        "computing all of them again",
        advice.gain_ms,
        (
            f"{bytes_text(-free)} of device memory are missing while all activations "
            "are kept",
            "simulated, with every layer computed again and with the best choice for "
            "each",
        ),
        advice.text,
        advice,
    )


# Less than this, or less than this share of the device, is not reported.
_MIN_BYTES = 2**30
_MIN_SHARE = 0.05


@rule("memory-outside-torch", GPU)
def memory_outside_torch(metrics: JobMetrics) -> Finding | Unknown | None:
    """Check the gap `outside torch`: `device` minus `reserved`."""
    gaps, capacity = metrics.min_gap_bytes("outside torch"), metrics.capacity_bytes
    if not gaps or capacity is None:
        return memory_outside_torch.unknown(
            "how much device memory is used outside torch?",
            "record with `ebbtide profile` (NVML and torch's allocator)"
            if capacity is not None or not gaps
            else record_memory(metrics),
        )
    largest = max(gaps)
    if largest < _MIN_BYTES or largest < _MIN_SHARE * capacity:
        return None
    return memory_outside_torch.finding(
        "Device memory is in use outside torch",
        None,
        (
            f"{scope_text(metrics)} never less than {bytes_text(largest)} of "
            f"{bytes_text(capacity)} is in use on the "
            "device beyond what torch has reserved",
        ),
        "look for other processes on the card (nvidia-smi), NCCL buffers "
        "(NCCL_BUFFSIZE) and libraries with workspaces",
    )


@rule("fragmentation", GPU)
def fragmentation(metrics: JobMetrics) -> Finding | Unknown | None:
    """Check the gap `fragmentation` over the iteration, or over a trace without any;
    where state is offloaded, over the update: torch keeps room for activations then. It
    counts only where torch reserved more although tensors never filled what it had
    (`needless_growth`): other settings do not shrink the allocator's cache."""
    phase = UPDATE if metrics.offloaded and metrics.iteration_ms is not None else None
    gaps, capacity = _gaps(metrics, phase), metrics.capacity_bytes
    if not gaps or capacity is None:
        return fragmentation.unknown(
            "how much of what torch has reserved holds no tensor?",
            "record with `ebbtide profile`; a monitor file alone does not have torch's "
            "counts"
            if not gaps
            else record_memory(metrics),
        )
    limit = max(_MIN_BYTES, _MIN_SHARE * capacity)
    largest = max(gaps)
    if largest < limit:
        return None
    measured = (
        f"{scope_text(metrics, phase)} never less than {bytes_text(largest)} of "
        f"{bytes_text(capacity)} is reserved "
        "without holding a tensor"
    )
    grown = max(needless_growth(metrics.trace, rank) for rank in metrics.trace.ranks)
    if grown >= limit:
        return fragmentation.finding(
            "Torch's memory is fragmented",
            None,
            (
                measured,
                f"torch reserved {bytes_text(grown)} more although tensors never "
                "filled what it had before",
            ),
            "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    return fragmentation.finding(
        "Torch has reserved memory that no tensor holds",
        None,
        (
            measured,
            "torch did not reserve more beside it: it is the allocator's cache, and "
            "nothing shows fragments",
        ),
        "torch.cuda.empty_cache() before the update frees it for the state"
        if phase
        else (
            "torch.cuda.empty_cache() after what needed it (start-up, evaluation) "
            "gives it back to the device; torch "
            "itself would use it for a larger batch"
        ),
    )


def needless_growth(trace: Trace, rank: int) -> int:
    """Return the bytes by which `reserved` grew without need.

    Tensors did not fill what was reserved before: `allocated` stays at the former size
    or below until `reserved` changes again. What is reserved first, and growth for a
    short-lived tensor that fills it, do not count.
    """
    spans = memory_spans(trace, rank, "reserved")
    timelines = memory_timeline(trace, rank, "reserved"), _tensors(trace, rank)
    if spans is None:
        return _needless_growth(*timelines)
    parts = (
        [_between(timeline, *span) for timeline in timelines]
        for span in zip(*spans, strict=True)
    )
    return sum(_needless_growth(*part) for part in parts)


def _between(timeline: tuple[Ints, Ints], start: int, end: int) -> tuple[Ints, Ints]:
    times, sizes = timeline
    inside = (times >= start) & (times <= end)
    return times[inside], sizes[inside]


def _needless_growth(
    reserved_timeline: tuple[Ints, Ints], tensor_timeline: tuple[Ints, Ints]
) -> int:
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


def _gaps(metrics: JobMetrics, phase: str | None) -> list[int]:
    """Return the smallest gap of each rank with one. Of a memory snapshot, `requested`
    stands in for `allocated`."""
    gaps = metrics.min_gap_bytes("fragmentation", phase)
    if gaps or metrics.iteration_ms is not None:
        return gaps
    for rank in metrics.trace.ranks:
        reserved, tensors = (
            memory_timeline(metrics.trace, rank, "reserved"),
            _tensors(metrics.trace, rank),
        )
        if len(reserved[0]) and len(tensors[0]):
            gaps.append(int(difference(reserved, tensors)[1].min()))
    return gaps


def _tensors(trace: Trace, rank: int) -> tuple[Ints, Ints]:
    """Return (times ns, bytes) of the blocks of tensors.

    Where blocks were not recorded, it is what the tensors requested.
    """
    allocated = memory_timeline(trace, rank, "allocated")
    return allocated if len(allocated[0]) else memory_timeline(trace, rank, "requested")


_MAX_SITES = 3


@rule("memory-growth", ALLOCATIONS)
def memory_growth(metrics: JobMetrics) -> Finding | None:
    """Report what `memory_growth` finds, of the rank with the most bytes."""
    by_rank = {
        rank: metrics.rank(rank).memory_growth or [] for rank in metrics.trace.ranks
    }
    totals = {
        rank: sum(site.bytes_per_iteration for site in sites)
        for rank, sites in by_rank.items()
    }
    rank = max(totals, key=lambda number: totals[number], default=None)
    if rank is None or not totals[rank]:
        return None
    sites = by_rank[rank]
    evidence = [
        f"rank {rank}: each of {sites[0].iterations} iterations leaves at least "
        f"{bytes_text(totals[rank])} behind",
        *(
            f"{bytes_text(site.bytes_per_iteration)} by "
            f"{site.site or 'an unknown call site'}"
            + (f" in {site.module}" if site.module else "")
            for site in sites[:_MAX_SITES]
        ),
    ]
    return memory_growth.finding(
        "Memory grows from iteration to iteration",
        None,
        evidence,
        "look for tensors that are kept at these places: losses that are summed with "
        "their graph (use loss.item()), "
        "lists and caches of outputs",
    )
