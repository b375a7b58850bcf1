"""Rules on DeepSpeed's own update, and on the state that it resumes from."""

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.findings.needs import GPU, ITERATIONS, MIN_SHARE, OFFLOADED
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.device_fit import equal_sizes
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.static_split import split_fits
from ebbtide.features.deepspeed.findings.needs import (
    DEEPSPEED,
    ENABLE_ENGINE,
    SUB_STEPS,
    SWAPPED,
    setup_of,
)
from ebbtide.features.deepspeed.setup import DeepSpeedSetup
from ebbtide.features.deepspeed.split import DeepSpeedSplit
from ebbtide.phases import UPDATE
from ebbtide.units import bytes_text, count_text, ms_text, rate_text


@rule("pageable-masters", ITERATIONS, OFFLOADED, SUB_STEPS)
def pageable_masters(metrics: JobMetrics) -> Finding | None:
    """Compare DeepSpeed's sub-step `parameters` with a copy of its bytes at the link's
    peak."""
    job, step, iteration = (
        setup_of(metrics),
        metrics.sub_step("parameters"),
        metrics.iteration_ms,
    )
    if (
        job is None
        or job.info.masters_pinned is not False
        or not metrics.offloaded
        or step is None
        or not iteration
    ):
        return None
    step_ms, peak = step.median_ms, metrics.peak_bytes_per_s
    if not step.bytes or step_ms < MIN_SHARE * iteration:
        return None
    gain = clamp_gain(step_ms - step.bytes / peak * 1e3) if peak else None
    if gain is not None and gain < MIN_SHARE * iteration:
        return None
    carries = f", over a link that carries {rate_text(peak)}" if peak else ""
    evidence = [
        f"`parameters` takes {ms_text(step_ms)} per iteration for "
        f"{bytes_text(step.bytes)}: "
        f"{rate_text(step.bytes / step_ms * 1e3)}{carries}",
        "DeepSpeed's fp32 masters are in pageable memory: the CPU converts them, and "
        "the copy keeps the host waiting",
    ]
    if step.h2d.pageable_share is not None:
        evidence.append(
            f"a pageable copy runs for {100 * step.h2d.pageable_share:.0f} % of that "
            "time"
        )
    return pageable_masters.finding(
        "Updated parameters are copied from pageable memory",
        gain,
        evidence,
        f"offload_optimizer.pin_memory pins gradients, not masters; {ENABLE_ENGINE} "
        "keeps them pinned, and uploads "
        "overlap",
    )


# Passes that cost less than this share of an iteration are not reported.
_PASSES_BESIDE_ADAM_MIN_SHARE = 0.02


@rule("passes-beside-adam", ITERATIONS, SUB_STEPS)
def passes_beside_adam(metrics: JobMetrics) -> Finding | None:
    """Measure DeepSpeed's sub-steps `unscale` and `parameters`, without the copy that
    `parameters` includes."""
    update, iteration = metrics.sub_step("update"), metrics.iteration_ms
    unscale, parameters = (
        metrics.sub_step("unscale", ("cpu",)),
        metrics.sub_step("parameters"),
    )
    update_ms = metrics.phase_ms(UPDATE)
    if update is None or not update.median_ms or not iteration or not update_ms:
        return None
    unscale_ms = unscale.median_ms if unscale is not None else 0.0
    convert_ms = parameters.median_ms if parameters is not None else 0.0
    saved = unscale_ms + convert_ms
    if (
        metrics.has_gpu
        and parameters is not None
        and parameters.bytes
        and metrics.peak_bytes_per_s
    ):
        # The copy itself remains, at best at the link's peak.
        saved = unscale_ms + clamp_gain(
            convert_ms - parameters.bytes / metrics.peak_bytes_per_s * 1e3
        )
    if saved < _PASSES_BESIDE_ADAM_MIN_SHARE * iteration:
        return None
    evidence = (
        f"`unscale` takes {ms_text(unscale_ms)} and `parameters` "
        f"{ms_text(convert_ms)}, in addition to "
        f"{ms_text(update.median_ms)} of the optimizer's kernel on the CPU",
        f"{100 * max(0.0, 1 - update.median_ms / update_ms):.0f} % of the update, "
        f"{ms_text(update_ms)}, is not that "
        "kernel",
    )
    return passes_beside_adam.finding(
        "The CPU passes over gradients and parameters again outside the optimizer's "
        "kernel",
        clamp_gain(saved),
        evidence,
        "one pass can unscale, update and write the half-precision parameter: "
        f"{ENABLE_ENGINE} does",
    )


# A split within this distance of the configured ratio counts as that ratio.
_TOLERANCE = 0.01
_MAX_SUBGROUPS = 1000


@rule("twin-flow-ratio", ITERATIONS, GPU, OFFLOADED, DEEPSPEED)
def twin_flow_ratio(metrics: JobMetrics) -> Finding | None:
    """Compare the share of the state in host memory with the configured ratio."""
    job, update, iteration = (
        setup_of(metrics),
        metrics.phase_ms(UPDATE),
        metrics.iteration_ms,
    )
    if (
        job is None
        or job.info.policy
        or not metrics.has_gpu
        or not update
        or not iteration
    ):
        return None
    configured, real = (
        job.ratio,
        job.real_ratio if job.real_ratio is not None else job.rounded_ratio,
    )
    if configured is None or real is None:
        return None
    cost = update * abs(real - configured) / max(real, configured, _TOLERANCE)
    if cost < MIN_SHARE * iteration:
        return None
    count = len(job.subgroups)
    larger = "more" if real > configured else "less"
    evidence = (
        f"the configured share on the CPU is {configured:g}; it is {real:.2f}: "
        f"{larger} than configured",
        f"DeepSpeed splits between whole subgroups, of which this rank has {count} "
        f"(of {count_text(min(job.subgroups))} to {count_text(max(job.subgroups))} "
        "parameters)",
    )
    return twin_flow_ratio.finding(
        "Twin-Flow's split differs from the configured ratio",
        clamp_gain(cost) if real > configured else None,
        evidence,
        _subgroup_advice(metrics, job, configured),
    )


def _subgroup_advice(metrics: JobMetrics, job: DeepSpeedSetup, ratio: float) -> str:
    """Advise the sub_group_size with the fewest subgroups that is near the ratio: the
    configured one in proportion to the numbers of subgroups.

    DeepSpeed adds whole tensors up to that size, so subgroups are larger."""
    params, count = sum(job.subgroups), len(job.subgroups)
    configured = job.zero_config.get("sub_group_size")
    size_now = (
        configured
        if isinstance(configured, (int, float)) and configured >= 1
        else params / count
    )
    split = DeepSpeedSplit(job.info.version or "")
    for subgroups in range(count + 1, _MAX_SUBGROUPS):
        share = 1 - len(split.resident(ratio, subgroups)) / subgroups
        if abs(share - ratio) <= _TOLERANCE:
            size = int(
                float(f"{min(params / subgroups, size_now * count / subgroups):.3g}")
            )
            # Subgroups of exactly that size, and as many as were counted.
            splits = [
                equal_sizes(params, one_size)
                for one_size in (size, -(-params // subgroups))
            ]
            fits = [
                split_fits(metrics, sizes, split.resident(ratio, len(sizes)))
                for sizes in splits
            ]
            if False in fits:
                return (
                    "smaller subgroups split finer, but the device has no memory for "
                    "the share that is configured"
                )
            return (
                f'smaller subgroups split finer: "sub_group_size": {size} makes about '
                f"{subgroups} of them, a share of "
                f"{share:.2f} (subgroups are whole tensors: a large one may keep it "
                "from that)"
            )
    return "smaller subgroups split finer (sub_group_size)"


@rule("lost-moments", SWAPPED)
def lost_moments(metrics: JobMetrics) -> Finding | None:
    """Return a finding if a checkpoint was loaded and the swapped state had no moments
    afterwards."""
    setup = setup_of(metrics)
    if setup is None or not setup.info.moments_lost:
        return None
    evidence = (
        "after `load_checkpoint`, which set the engine's step count, the swapped "
        "state knew no file of a moment",
        "DeepSpeed copies these files, but a new process does not read them: moments "
        "and Adam's step count begin at 0",
    )
    return lost_moments.finding(
        "Training was resumed without Adam's moments and step count",
        None,
        evidence,
        "train with offload_optimizer.device: cpu, whose checkpoints are exact, or "
        "warm the learning rate up again; "
        "losses after this resume are not those of an uninterrupted run",
    )
