"""Rules on the update and on gradients of an offloaded job."""

from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.findings.needs import (
    DEEPSPEED,
    ENABLE_ENGINE,
    GPU,
    ITERATIONS,
    MAYBE_OFFLOADED,
    MIN_SHARE,
    OFFLOADED,
    SUB_STEPS,
    SWAPPED,
)
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.deepspeed_setup import DeepSpeedSetup, resident_range, resident_subgroups
from ebbtide.analysis.metrics.device_fit import equal_sizes
from ebbtide.analysis.metrics.gradient_wait import GradientWait, gradient_wait
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link import CopyStats
from ebbtide.analysis.metrics.recorded_free_memory import param_bytes, state_bytes
from ebbtide.analysis.metrics.static_split import split_fits
from ebbtide.analysis.metrics.substeps.breakdown import SubStep
from ebbtide.phases import BACKWARD, FORWARD, UPDATE
from ebbtide.state_bytes import GRAD_BYTES, STATE_BYTES
from ebbtide.units import bytes_text, count_text, ms_text, rate_text


@rule("blocking-gradients", ITERATIONS, MAYBE_OFFLOADED)
def blocking_gradients(metrics: JobMetrics) -> Finding | None:
    """Report the wait that `gradient_wait` measures."""
    wait, backward = gradient_wait(metrics), metrics.phase_ms(BACKWARD)
    if wait is None or backward is None:
        return None
    if wait.step is not None:
        evidence = _step_evidence(wait.step, backward)
    elif wait.copies is not None:
        evidence = _copy_evidence(wait.copies, backward)
    else:
        evidence = _duration_evidence(metrics, wait, backward)
    return blocking_gradients.finding(
        "The backward waits while gradients are copied to the host",
        clamp_gain(wait.wait_ms),
        evidence,
        "copy gradients to the host asynchronously, overlapped with the backward (DeepSpeed does so by default from "
        "0.19.5; it needs pinned host buffers)",
    )


def _step_evidence(step: SubStep, backward: float) -> list[str]:
    evidence = [
        f"`gradient down` keeps the host for {ms_text(step.median_ms)} of the backward's {ms_text(backward)}, "
        f"{step.count:,.0f} times for {bytes_text(step.bytes)}",
    ]
    if step.d2h.pageable_share:
        evidence.append(f"a pageable copy runs for {100 * step.d2h.pageable_share:.0f} % of that time")
    return evidence


def _copy_evidence(copies: CopyStats, backward: float) -> list[str]:
    return [
        f"{copies.count:,} pageable copies of gradients per iteration in the backward, {bytes_text(copies.bytes)}, "
        f"{ms_text(copies.busy_ms)} of its {ms_text(backward)}",
        "a copy into pageable memory does not return before it is done, and nothing is launched meanwhile",
    ]


def _duration_evidence(metrics: JobMetrics, wait: GradientWait, backward: float) -> list[str]:
    forward = metrics.phase_ms(FORWARD) or 0.0
    evidence = [
        f"backward takes {ms_text(backward)}, {backward / forward:.1f} times the forward's {ms_text(forward)}; "
        f"compute, recomputation and reduction explain about {wait.explained_forwards} times",
    ]
    down = metrics.phase_link(BACKWARD, "d2h")
    if down is not None and down.mean_bytes_per_s is not None:
        share = down.share_of_peak
        of_peak = f", {100 * share:.0f} % of the link's peak" if share is not None else ""
        evidence.append(
            f"meanwhile {bytes_text(down.bytes)} go down to the host at {rate_text(down.mean_bytes_per_s)}{of_peak}"
            + MOST_MOVED
        )
    offload = metrics.zero.get("offload_optimizer")
    if isinstance(offload, dict):
        evidence.append("the DeepSpeed configuration offloads the optimizer to the " + str(offload.get("device")))
    return evidence


MOST_MOVED = " (the rank that moves most)"
# DeepSpeed's ZeRO-3 moves 6 B a parameter down and 2 B up. If more than this many times the 2 B needed go down,
# gradients make that round trip.
_ROUND_TRIP = 1.5


@rule("gradient-round-trip", ITERATIONS, OFFLOADED, DEEPSPEED)
def gradient_round_trip(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare the bytes that go down in the backward with one copy of the gradients in half precision."""
    job, params, iteration = metrics.deepspeed, metrics.params, metrics.iteration_ms
    if job is None or job.info.policy or job.stage != 3 or not metrics.offloaded or not params or not iteration:
        return None
    down, up = metrics.phase_link(BACKWARD, "d2h"), metrics.phase_link(BACKWARD, "h2d")
    if down is None or down.bytes is None:
        return gradient_round_trip.unknown(
            "how often do gradients cross the link? DeepSpeed's ZeRO-3 takes them down, up and down again",
            "record copies: ebbtide profile --transfers, or counters of the link",
        )
    # Gradients of a resident part go down too: their buffers are on the host for every ratio.
    needed = GRAD_BYTES * params
    if down.bytes < _ROUND_TRIP * needed:
        return None
    # Offloaded parameters go up in the backward too; then none of the bytes up are counted as gradients.
    back = 0.0 if up is None or up.bytes is None or job.zero_config.get("offload_param") else min(up.bytes, needed)
    costs = [_part_ms(metrics, down.busy_ms, down.bytes, down.bytes - needed)]
    if back and up is not None and up.bytes:
        costs.append(_part_ms(metrics, up.busy_ms, up.bytes, back))
    recorded = [cost for cost in costs if cost is not None]
    gain = clamp_gain(sum(recorded), metrics.phase_ms(BACKWARD) or iteration) if recorded else None
    if gain is not None and gain < MIN_SHARE * iteration:
        return None
    evidence = (
        f"in the backward {bytes_text(down.bytes)} go down, {down.bytes / params:.1f} B a parameter, and "
        f"{bytes_text(up.bytes if up is not None else None)} up{MOST_MOVED}; one copy in half precision is "
        f"{bytes_text(needed)}",
        "DeepSpeed's ZeRO-3 takes each gradient down, back up, and down again in fp32",
    )
    return gradient_round_trip.finding(
        "Gradients cross the link more than once",
        gain,
        evidence,
        f"{ENABLE_ENGINE} takes each down once, in half precision",
    )


def _part_ms(metrics: JobMetrics, busy_ms: float | None, moved: float, part: float) -> float | None:
    """Return the time of a part of the moved bytes: by the copies' own time, else at the link's peak."""
    if busy_ms is not None:
        return busy_ms * part / moved
    return part / metrics.peak_bytes_per_s * 1e3 if metrics.peak_bytes_per_s else None


# An update that takes less than this share of the iteration does not slow it down.
_MIN_SHARE = 0.1
# A link that is idle for more than this share can carry optimizer state.
_IDLE_SHARE = 0.5
# Real copies reach about this share of a link's peak.
_REACHED_SHARE = 0.8


@rule("cpu-bound-update", ITERATIONS, OFFLOADED)
def cpu_bound_update(metrics: JobMetrics) -> Finding | Unknown | None:
    """Estimate the update if the idle link carried optimizer state: params / (CPU rate + link rate / 12 B), if every
    parameter whose state it can carry both ways were updated on the GPU. Host memory may allow less."""
    update, iteration, params = metrics.phase_ms(UPDATE), metrics.iteration_ms, metrics.offloaded_params
    if not update or not iteration or update < _MIN_SHARE * iteration or not metrics.offloaded:
        return None
    h2d, d2h = metrics.phase_link(UPDATE, "h2d"), metrics.phase_link(UPDATE, "d2h")
    shares = [use.share_of_peak for use in (h2d, d2h) if use is not None and use.share_of_peak is not None]
    if len(shares) < 2:
        return cpu_bound_update.unknown(
            f"the update takes {ms_text(update)}: is the link idle meanwhile?",
            "record the link: ebbtide profile on a machine with NVML counters, or with --transfers"
            if metrics.peak_bytes_per_s or not (metrics.has_counters or metrics.has_copies)
            else "the link's peak is not known: import with --link 5x16 (PCIe generation 5, 16 lanes)",
        )
    if max(shares) > 1 - _IDLE_SHARE:
        return None
    evidence = [
        f"the update takes {ms_text(update)}, {100 * update / iteration:.0f} % of the iteration",
        f"meanwhile h2d is used to {100 * shares[0]:.0f} % of the link's peak, d2h to {100 * shares[1]:.0f} %",
    ]
    gain = None
    if params and metrics.peak_bytes_per_s:
        cpu_rate = params / (update / 1e3)
        link_rate = _REACHED_SHARE * metrics.peak_bytes_per_s * (1 - max(shares)) / STATE_BYTES
        gain = clamp_gain(update - params / (cpu_rate + link_rate) * 1e3)
        evidence.append(
            f"the CPU updates {count_text(cpu_rate)} parameters/s; the idle part of the link could carry the state of "
            f"{count_text(link_rate)} parameters/s in and out"
        )
    free = metrics.min_gap_bytes("free", UPDATE)
    if free and params:
        per_param = state_bytes(metrics.entry) + param_bytes(metrics.entry)
        evidence.append(
            f"in the median update at least {bytes_text(min(free))} of device memory are free (capacity minus "
            f"{metrics.free_pool}): optimizer state and gradients ({per_param:g} B each) of "
            f"{count_text(min(free) / per_param)} parameters, of {count_text(params)} offloaded ones on this rank"
        )
    return cpu_bound_update.finding(
        "The update waits for the CPU while the link is idle",
        gain,
        evidence,
        "update part of the subgroups on the GPU: keep their state there if memory is free, else copy it in and out",
    )


@rule("pageable-masters", ITERATIONS, OFFLOADED, SUB_STEPS)
def pageable_masters(metrics: JobMetrics) -> Finding | None:
    """Compare DeepSpeed's sub-step `parameters` with a copy of its bytes at the link's peak."""
    job, step, iteration = metrics.deepspeed, metrics.sub_step("parameters"), metrics.iteration_ms
    if job is None or job.info.masters_pinned is not False or not metrics.offloaded or step is None or not iteration:
        return None
    step_ms, peak = step.median_ms, metrics.peak_bytes_per_s
    if not step.bytes or step_ms < MIN_SHARE * iteration:
        return None
    gain = clamp_gain(step_ms - step.bytes / peak * 1e3) if peak else None
    if gain is not None and gain < MIN_SHARE * iteration:
        return None
    carries = f", over a link that carries {rate_text(peak)}" if peak else ""
    evidence = [
        f"`parameters` takes {ms_text(step_ms)} per iteration for {bytes_text(step.bytes)}: "
        f"{rate_text(step.bytes / step_ms * 1e3)}{carries}",
        "DeepSpeed's fp32 masters are in pageable memory: the CPU converts them, and the copy keeps the host waiting",
    ]
    if step.h2d.pageable_share is not None:
        evidence.append(f"a pageable copy runs for {100 * step.h2d.pageable_share:.0f} % of that time")
    return pageable_masters.finding(
        "Updated parameters are copied from pageable memory",
        gain,
        evidence,
        f"offload_optimizer.pin_memory pins gradients, not masters; {ENABLE_ENGINE} keeps them pinned, and uploads "
        "overlap",
    )


# Passes that cost less than this share of an iteration are not reported.
_PASSES_BESIDE_ADAM_MIN_SHARE = 0.02


@rule("passes-beside-adam", ITERATIONS, SUB_STEPS)
def passes_beside_adam(metrics: JobMetrics) -> Finding | None:
    """Measure DeepSpeed's sub-steps `unscale` and `parameters`, without the copy that `parameters` includes."""
    update, iteration = metrics.sub_step("update"), metrics.iteration_ms
    unscale, parameters = metrics.sub_step("unscale", ("cpu",)), metrics.sub_step("parameters")
    update_ms = metrics.phase_ms(UPDATE)
    if update is None or not update.median_ms or not iteration or not update_ms:
        return None
    unscale_ms = unscale.median_ms if unscale is not None else 0.0
    convert_ms = parameters.median_ms if parameters is not None else 0.0
    saved = unscale_ms + convert_ms
    if metrics.has_gpu and parameters is not None and parameters.bytes and metrics.peak_bytes_per_s:
        # The copy itself remains, at best at the link's peak.
        saved = unscale_ms + clamp_gain(convert_ms - parameters.bytes / metrics.peak_bytes_per_s * 1e3)
    if saved < _PASSES_BESIDE_ADAM_MIN_SHARE * iteration:
        return None
    evidence = (
        f"`unscale` takes {ms_text(unscale_ms)} and `parameters` {ms_text(convert_ms)}, in addition to "
        f"{ms_text(update.median_ms)} of the optimizer's kernel on the CPU",
        f"{100 * max(0.0, 1 - update.median_ms / update_ms):.0f} % of the update, {ms_text(update_ms)}, is not that "
        "kernel",
    )
    return passes_beside_adam.finding(
        "The CPU passes over gradients and parameters again outside the optimizer's kernel",
        clamp_gain(saved),
        evidence,
        f"one pass can unscale, update and write the half-precision parameter: {ENABLE_ENGINE} does",
    )


# A split within this distance of the configured ratio counts as that ratio.
_TOLERANCE = 0.01
_MAX_SUBGROUPS = 1000


@rule("twin-flow-ratio", ITERATIONS, GPU, OFFLOADED, DEEPSPEED)
def twin_flow_ratio(metrics: JobMetrics) -> Finding | None:
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
    return twin_flow_ratio.finding(
        "Twin-Flow's split differs from the configured ratio",
        clamp_gain(cost) if real > configured else None,
        evidence,
        _subgroup_advice(metrics, job, configured),
    )


def _subgroup_advice(metrics: JobMetrics, job: DeepSpeedSetup, ratio: float) -> str:
    """Advise the sub_group_size of the fewest subgroups that come close to the ratio: the configured one in proportion
    to their numbers. DeepSpeed adds whole tensors up to that size, so subgroups are larger."""
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


@rule("lost-moments", SWAPPED)
def lost_moments(metrics: JobMetrics) -> Finding | None:
    """Return a finding if a checkpoint was loaded and the swapped state had no moments afterwards."""
    if metrics.deepspeed is None or not metrics.deepspeed.info.moments_lost:
        return None
    evidence = (
        "after `load_checkpoint`, which set the engine's step count, the swapped state knew no file of a moment",
        "DeepSpeed copies these files, but a new process does not read them: moments and Adam's step count begin at 0",
    )
    return lost_moments.finding(
        "Training was resumed without Adam's moments and step count",
        None,
        evidence,
        "train with offload_optimizer.device: cpu, whose checkpoints are exact, or warm the learning rate up again; "
        "losses after this resume are not those of an uninterrupted run",
    )
