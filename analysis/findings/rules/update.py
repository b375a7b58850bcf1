"""Rules on the update of an offloaded job."""

from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.findings.needs import ITERATIONS, OFFLOADED
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.recorded_free_memory import (
    has_own_masters,
    param_bytes,
    state_bytes,
)
from ebbtide.phases import UPDATE
from ebbtide.state_bytes import STATE_BYTES
from ebbtide.units import bytes_text, count_text, ms_text

# An update that takes less than this share of the iteration does not slow it down.
_MIN_SHARE = 0.1
# A link that is idle for more than this share can carry optimizer state.
_IDLE_SHARE = 0.5
# An update that takes this share of an iteration is what it waits for.
_MOST_OF_IT = 0.5
# Without offload an update copies step counts and norms: less than this.
_NO_STATE_BYTES = 1e6
# Real copies reach about this share of a link's peak.
_REACHED_SHARE = 0.8


@rule("cpu-bound-update", ITERATIONS, OFFLOADED)
def cpu_bound_update(metrics: JobMetrics) -> Finding | Unknown | None:
    """Estimate the update if the idle link carried optimizer state: params / (CPU rate
    + link rate / 12 B), if every parameter whose state it can carry both ways were
    updated on the GPU. Host memory may allow less."""
    update, iteration, params = (
        metrics.phase_ms(UPDATE),
        metrics.iteration_ms,
        metrics.offloaded_params,
    )
    if (
        not update
        or not iteration
        or update < _MIN_SHARE * iteration
        or not metrics.offloaded
    ):
        return None
    h2d, d2h = metrics.phase_link(UPDATE, "h2d"), metrics.phase_link(UPDATE, "d2h")
    shares = [
        use.share_of_peak
        for use in (h2d, d2h)
        if use is not None and use.share_of_peak is not None
    ]
    if len(shares) < 2:
        return cpu_bound_update.unknown(
            f"the update takes {ms_text(update)}: is the link idle meanwhile?",
            "record the link: ebbtide profile on a machine with NVML counters, or with "
            "--transfers"
            if metrics.peak_bytes_per_s
            or not (metrics.has_counters or metrics.has_copies)
            else "the link's peak is not known: import with --link 5x16 (PCIe generation 5, 16 lanes)",
        )
    if max(shares) > 1 - _IDLE_SHARE:
        return None
    evidence = [
        f"the update takes {ms_text(update)}, {100 * update / iteration:.0f} % of the "
        "iteration",
        f"meanwhile h2d is used to {100 * shares[0]:.0f} % of the link's peak, d2h to "
        f"{100 * shares[1]:.0f} %",
    ]
    gain = None
    if params and metrics.peak_bytes_per_s:
        cpu_rate = params / (update / 1e3)
        link_rate = (
            _REACHED_SHARE * metrics.peak_bytes_per_s * (1 - max(shares)) / STATE_BYTES
        )
        gain = clamp_gain(update - params / (cpu_rate + link_rate) * 1e3)
        evidence.append(
            f"the CPU updates {count_text(cpu_rate)} parameters/s; the idle part of "
            "the link could carry the state of "
            f"{count_text(link_rate)} parameters/s in and out"
        )
    free = metrics.min_gap_bytes("free", UPDATE)
    if free and params:
        per_param = state_bytes(metrics.entry, has_own_masters(metrics)) + param_bytes(
            metrics.entry
        )
        evidence.append(
            f"in the median update at least {bytes_text(min(free))} of device memory "
            "are free (capacity minus "
            f"{metrics.free_pool}): optimizer state and gradients ({per_param:g} B "
            "each) of "
            f"{count_text(min(free) / per_param)} parameters, of {count_text(params)} "
            "offloaded ones on this rank"
        )
    return cpu_bound_update.finding(
        "The update waits for the CPU while the link is idle",
        gain,
        evidence,
        "update part of the subgroups on the GPU: keep their state there if memory is "
        "free, else copy it in and out",
    )


@rule("update-bound", ITERATIONS)
def update_bound(metrics: JobMetrics) -> Finding | None:
    """Report an update that takes most of the iteration where the link is not known, so
    that `cpu-bound-update` cannot tell what it waits for."""
    update, iteration = metrics.phase_ms(UPDATE), metrics.iteration_ms
    links = [metrics.phase_link(UPDATE, direction) for direction in ("h2d", "d2h")]
    is_measured = all(
        use is not None and use.share_of_peak is not None for use in links
    )
    if not update or not iteration or update < _MOST_OF_IT * iteration:
        return None
    if metrics.offloaded is False or is_measured:
        return None
    if metrics.offloaded is None and all(
        use is not None and use.bytes is not None and use.bytes < _NO_STATE_BYTES
        for use in links
    ):
        return None
    state = (
        "optimizer state is in host memory: the CPU updates it"
        if metrics.offloaded
        else "an update on the GPU rarely takes this long: its optimizer state may be in "
        "host memory"
    )
    share = 100 * update / iteration
    return update_bound.finding(
        "The update takes most of the iteration",
        None,
        (f"the update takes {ms_text(update)}, {share:.0f} % of the iteration", state),
        "give the CPU's update all cores of its NUMA node, keep part of the state on the "
        "GPU, or accumulate more micro-steps for each update",
    )
