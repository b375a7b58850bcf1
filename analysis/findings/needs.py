"""Conditions, limits and texts that several rules share."""

from ebbtide.analysis.findings.rule import Need
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.machines.sheets import shares_host_memory
from ebbtide.phases import BACKWARD, FORWARD


def _has_drifts(metrics: JobMetrics) -> bool:
    from ebbtide.analysis.metrics.drift import compared_quantities

    return bool(compared_quantities(metrics.trace))


ITERATIONS = Need(
    "finished iterations with phases", lambda metrics: metrics.iteration_ms is not None
)
PASSES = Need(
    "phases of forward and backward",
    lambda metrics: (
        metrics.phase_ms(FORWARD) is not None and metrics.phase_ms(BACKWARD) is not None
    ),
)
GPU = Need("a job on a GPU", lambda metrics: metrics.has_gpu)
UNIFIED = Need(
    "a GPU that shares the memory of the CPU",
    lambda metrics: any(
        rank.device.kind == "mps" or bool(shares_host_memory(rank.device.name))
        for rank in metrics.by_rank
    ),
)
SEPARATE_MEMORY = Need(
    "a GPU with memory of its own", lambda metrics: not UNIFIED.is_met(metrics)
)
MEASURED = Need(
    "a job that ran",
    lambda metrics: metrics.trace.meta.source not in ("predicted", "simulated"),
)
RANKS = Need("two ranks or more", lambda metrics: len(metrics.trace.ranks) > 1)
OFFLOADED = Need(
    "optimizer state in host memory",
    lambda metrics: bool(metrics.offloaded),
    ends_with_offload=True,
)
MAYBE_OFFLOADED = Need(
    OFFLOADED.text,
    lambda metrics: metrics.offloaded is not False,
    ends_with_offload=True,
)
CPU_UPDATE = Need(
    "an update on the CPU",
    lambda metrics: (
        bool(metrics.offloaded) or (not metrics.has_gpu and bool(metrics.trace.ranks))
    ),
    ends_with_offload=True,
)
KERNELS = Need(
    "kernels of the GPU (import a torch.profiler trace)",
    lambda metrics: any(rank.busy_time is not None for rank in metrics.by_rank),
)
CHECKPOINTING = Need(
    "forwards that are computed again in the backward",
    lambda metrics: bool(metrics.checkpointing),
)
NO_CHECKPOINTING = Need(
    "forwards that are not computed again in the backward",
    lambda metrics: metrics.checkpointing is False,
)
LAYERS = Need(
    "a dry run of one rank (`ebbtide dry-run`), which has layers",
    lambda metrics: (
        metrics.trace.meta.source == "predicted" and metrics.world_size == 1
    ),
)
HOST_MEMORY = Need(
    "memory of the host (`ebbtide profile` records it)",
    lambda metrics: (
        metrics.is_recorded
        or any(metrics.pool_peak(pool) is not None for pool in ("swap", "host"))
    ),
)
NUMA_NODES = Need(
    "NUMA nodes of the host (`ebbtide profile` records them)",
    lambda metrics: (
        metrics.is_recorded
        or any(entry.numa is not None for entry in metrics.trace.meta.ranks)
    ),
)
ALLOCATIONS = Need(
    "the allocations of three iterations (`ebbtide profile --allocator-iterations 3`)",
    lambda metrics: any(rank.memory_growth is not None for rank in metrics.by_rank),
)
# As many as `analysis.timeseries.change_point` compares, which a test checks.
ENOUGH_VALUES = Need("8 steady iterations or more", _has_drifts)


# A cause that costs less than this share of an iteration is not reported.
MIN_SHARE = 0.01
RECORD_COPIES = "record each copy: ebbtide profile --transfers"


def scope_text(metrics: JobMetrics, phase: str | None = None) -> str:
    """Return the time that figures are of: the median iteration, one of its phases, or
    the whole trace."""
    return (
        "in the whole trace"
        if metrics.iteration_ms is None
        else f"in the median {phase or 'iteration'}"
    )


def record_memory(metrics: JobMetrics) -> str:
    """Return how to make free memory known.

    Where only the capacity is missing, it is by the capacity.
    """
    if metrics.free_pool is not None and metrics.capacity_bytes is None:
        return "the capacity of the device is not known: import with --capacity 80GB"
    return "record on a machine with NVML, or import with --capacity and a monitor file"
