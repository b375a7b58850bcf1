"""An update that the host's CPUs hold up."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.trace_metrics import STATE_BYTES, Study, at_most
from ebbtide.units import bytes_text, count_text, ms_text

# An update that is shorter than this part of the iteration holds nothing up.
_LEAST_SHARE = 0.1
# A link that is idle for more than this is free to carry optimizer state.
_IDLE = 0.5
# Real copies reach about this share of a link's peak.
_REACHED = 0.8


def cpu_bound_update(study: Study) -> Finding | Unknown | None:
    """An offloaded update that runs on the CPU while the link idles. Worth: if every parameter whose state the link can
    carry both ways meanwhile were updated on the GPU, params / (CPU rate + link rate / 12 B) is what remains; host
    memory may allow less."""
    update, iteration, params = study.ms("update"), study.iteration_ms, study.offloaded_params
    if not update or not iteration or update < _LEAST_SHARE * iteration or not study.offloaded:
        return None
    up, down = study.phase_link("update", "h2d"), study.phase_link("update", "d2h")
    shares = [use.share_of_peak for use in (up, down) if use is not None and use.share_of_peak is not None]
    if len(shares) < 2:
        return Unknown(
            "cpu-bound-update",
            f"the update takes {ms_text(update)}: does the link idle meanwhile?",
            "record the link: ebbtide profile on a machine with NVML counters, or with --transfers"
            if study.peak_bytes_per_s or not (study.has_counters or study.has_copies)
            else "the link's peak is not known: import with --link 5x16 (PCIe generation 5, 16 lanes)",
        )
    if max(shares) > 1 - _IDLE:
        return None
    evidence = [
        f"the update takes {ms_text(update)}, {100 * update / iteration:.0f} % of the iteration",
        f"meanwhile h2d is used to {100 * shares[0]:.0f} % of the link's peak, d2h to {100 * shares[1]:.0f} %",
    ]
    worth = None
    if params and study.peak_bytes_per_s:
        cpu = params / (update / 1e3)
        through_link = _REACHED * study.peak_bytes_per_s * (1 - max(shares)) / STATE_BYTES
        worth = at_most(update - params / (cpu + through_link) * 1e3)
        evidence.append(
            f"the CPU updates {count_text(cpu)} parameters/s; the idle part of the link could carry the state of "
            f"{count_text(through_link)} parameters/s in and out"
        )
    free = study.least_gap("free", "update")
    if free and params:
        evidence.append(
            f"in the median update at least {bytes_text(min(free))} of device memory are free: the state of "
            f"{count_text(min(free) / STATE_BYTES)} parameters, of {count_text(params)} offloaded ones on this rank"
        )
    return Finding(
        "cpu-bound-update",
        "The update waits for the CPU while the link is idle",
        worth,
        tuple(evidence),
        "update part of the subgroups on the GPU: keep their state there if memory is free, else copy it in and out",
    )


def too_few_threads(study: Study) -> Finding | Unknown | None:
    """An update on the CPU with fewer threads than there are cores for it; torchrun sets OMP_NUM_THREADS=1."""
    update, iteration = study.ms("update"), study.iteration_ms
    on_cpu = study.offloaded or (not study.has_gpu and bool(study.trace.ranks))
    if not on_cpu or not update or not iteration or update < _LEAST_SHARE * iteration:
        return None
    threads = study.entry.get("threads") or {}
    told = threads.get("torch") or threads.get("omp")
    cores = ((study.trace.meta.get("host") or {}).get("cpu") or {}).get("cores")
    try:
        used, cores = int(str(told)), int(str(cores))
    except ValueError:
        return Unknown(
            "too-few-threads",
            "with how many threads does the CPU update run, on how many cores?",
            "ebbtide profile records them; a log alone does not",
        )
    here = [r for r in study.trace.ranks if study.trace.rank(r).get("host") == study.entry.get("host")]
    # Ranks that were not recorded may run here too.
    ranks = len(here) + study.world_size - len(study.trace.ranks)
    possible = max(cores // ranks, 1)
    # Torch takes one thread for the two that a core may have.
    if used * 2 >= possible:
        return None
    evidence = (
        f"the update takes {ms_text(update)} on {used} thread{'s' if used > 1 else ''} a rank",
        f"the job may use {cores} cores, {possible} a rank"
        + (f"; OMP_NUM_THREADS is {threads['omp']}" if threads.get("omp") else ""),
    )
    return Finding(
        "too-few-threads",
        "The CPU update runs on too few threads",
        at_most(update * (1 - used / possible)),
        evidence,
        f"start the job with OMP_NUM_THREADS={possible} (torchrun sets 1 where it is not set)",
    )
