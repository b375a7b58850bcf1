"""Finds a static split of whole subgroups (Twin-Flow) that is far from the configured ratio."""

from __future__ import annotations

from ebbtide.analysis.findings.common import MIN_SHARE
from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.deepspeed import DeepSpeedSetup, resident_range, resident_subgroups
from ebbtide.analysis.metrics.device_fit import equal_sizes
from ebbtide.analysis.metrics.static_split import split_fits
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import UPDATE
from ebbtide.units import count_text

# A split within this distance of the configured ratio counts as that ratio.
_TOLERANCE = 0.01
_MAX_SUBGROUPS = 1000


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the share of the state in host memory with the configured ratio."""
    job, update, iteration = metrics.deepspeed, metrics.phase_ms(UPDATE), metrics.iteration_ms
    if job is None or job.info.policy or not metrics.has_gpu or not update or not iteration:
        return None
    configured, real = job.ratio, job.real_ratio if job.real_ratio is not None else job.rounded_ratio
    if configured is None or real is None:
        return None
    cost = update * abs(real - configured) / max(real, configured, _TOLERANCE)
    if cost < MIN_SHARE * iteration:
        return None
    count = len(job.subgroups)
    larger = "more" if real > configured else "less"
    evidence = (
        f"the configured share on the CPU is {configured:g}; it is {real:.2f}: {larger} than configured",
        f"DeepSpeed splits between whole subgroups, of which this rank has {count} "
        f"(of {count_text(min(job.subgroups))} to {count_text(max(job.subgroups))} parameters)",
    )
    return Finding(
        "twin-flow-ratio",
        "Twin-Flow's split differs from the configured ratio",
        clamp_gain(cost) if real > configured else None,
        evidence,
        _subgroup_advice(metrics, job, configured),
    )


def _subgroup_advice(metrics: TraceMetrics, job: DeepSpeedSetup, ratio: float) -> str:
    """Advise the sub_group_size of the fewest subgroups that come close to the ratio.

    DeepSpeed adds whole tensors to a subgroup until it has sub_group_size parameters, so subgroups are larger than
    that. The advised size is smaller than the configured one in proportion to the numbers of subgroups.
    """
    params, count = sum(job.subgroups), len(job.subgroups)
    configured = job.zero_config.get("sub_group_size")
    size_now = configured if isinstance(configured, (int, float)) and configured >= 1 else params / count
    for subgroups in range(count + 1, _MAX_SUBGROUPS):
        share = 1 - resident_subgroups(ratio, subgroups, job.info.version) / subgroups
        if abs(share - ratio) <= _TOLERANCE:
            size = int(float(f"{min(params / subgroups, size_now * count / subgroups):.3g}"))
            # Subgroups of exactly that size, and as many as were counted.
            splits = [equal_sizes(params, one_size) for one_size in (size, -(-params // subgroups))]
            fits = [split_fits(metrics, sizes, resident_range(ratio, len(sizes), job.info.version)) for sizes in splits]
            if False in fits:
                return "smaller subgroups split finer, but the device has no memory for the share that is configured"
            return (
                f'smaller subgroups split finer: "sub_group_size": {size} makes about {subgroups} of them, a share of '
                f"{share:.2f} (subgroups are whole tensors: a large one may keep it from that)"
            )
    return "smaller subgroups split finer (sub_group_size)"
