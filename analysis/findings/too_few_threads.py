"""Finds an update on the CPU that uses fewer threads than there are cores for it."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import UPDATE
from ebbtide.units import ms_text

# An update that takes less than this share of the iteration does not slow it down.
_MIN_SHARE = 0.1


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Compare the threads of a rank with its share of the cores; torchrun sets OMP_NUM_THREADS=1."""
    update, iteration = metrics.phase_ms(UPDATE), metrics.iteration_ms
    on_cpu = metrics.offloaded or (not metrics.has_gpu and bool(metrics.trace.ranks))
    if not on_cpu or not update or not iteration or update < _MIN_SHARE * iteration:
        return None
    threads, host_cores = metrics.entry.threads, metrics.trace.meta.host.cpu.cores
    try:
        used, cores = int(str(threads.torch or threads.omp)), int(str(host_cores))
    except ValueError:
        return Unknown(
            "too-few-threads",
            "how many threads does the CPU update use, on how many cores?",
            "ebbtide profile records them; a log alone does not",
        )
    same_host = [r for r in metrics.trace.ranks if metrics.trace.rank(r).host == metrics.entry.host]
    # Ranks that were not recorded may run on this host too.
    ranks = len(same_host) + metrics.world_size - len(metrics.trace.ranks)
    possible = max(cores // ranks, 1)
    # Torch uses one thread for the two that a core may have.
    if used * 2 >= possible:
        return None
    evidence = (
        f"the update takes {ms_text(update)} on {used} thread{'s' if used > 1 else ''} a rank",
        f"the job may use {cores} cores, {possible} a rank"
        + (f"; OMP_NUM_THREADS is {threads.omp}" if threads.omp else ""),
    )
    return Finding(
        "too-few-threads",
        "The CPU update runs on too few threads",
        clamp_gain(update * (1 - used / possible)),
        evidence,
        f"start the job with OMP_NUM_THREADS={possible} (torchrun sets 1 where it is not set)",
    )
