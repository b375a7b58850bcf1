"""What DeepSpeed's own step costs, sub-step by sub-step."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.deepspeed import DeepSpeed, resident
from ebbtide.analysis.metrics.trace_metrics import Study, at_most
from ebbtide.units import bytes_text, count_text, ms_text, rate_text

# What costs less than these shares of an iteration is not worth a line.
_LEAST_SHARE = 0.01
_LEAST_PASSES = 0.02
# A split that comes so near to the one that was asked for is that one.
_NEAR = 0.01
_MOST_SUBGROUPS = 1000
# Of a gradient in half precision. DeepSpeed takes it down, back up, and down again in fp32: 6 B down, 2 B up.
_GRADIENT_BYTES = 2
# So much more than that goes down, and gradients go there and back.
_ROUND_TRIP = 1.5
_ENABLE = '`ebbtide.interleave.deepspeed.enable(policy="adaptive")`'


def twin_flow_ratio(study: Study) -> Finding | None:
    """A static split of whole subgroups that is far from the ratio that was asked for."""
    job, update, iteration = study.deepspeed, study.ms("update"), study.iteration_ms
    if job is None or job.policy or not study.has_gpu or not update or not iteration:
        return None
    asked, real = job.ratio, _real_ratio(job)
    if asked is None or real is None:
        return None
    cost = update * abs(real - asked) / max(real, asked, _NEAR)
    if cost < _LEAST_SHARE * iteration:
        return None
    count = len(job.subgroups)
    larger = "more" if real > asked else "less"
    evidence = (
        f"asked for is a share of {asked:g} on the CPU; it is {real:.2f}: {larger} than asked",
        f"DeepSpeed splits between whole subgroups, of which this rank has {count} "
        f"(of {count_text(min(job.subgroups))} to {count_text(max(job.subgroups))} parameters)",
    )
    return Finding(
        "twin-flow-ratio",
        "Twin-Flow's split is not the one that was asked for",
        at_most(cost) if real > asked else None,
        evidence,
        _finer(asked, sum(job.subgroups), count),
    )


def _real_ratio(job: DeepSpeed) -> float | None:
    if job.real_ratio is not None or not job.subgroups or job.ratio is None or job.stage != 3:
        return job.real_ratio
    return sum(job.subgroups[resident(job.ratio, len(job.subgroups)) :]) / sum(job.subgroups)


def _finer(asked: float, params: int, count: int) -> str:
    """The sub_group_size of the fewest subgroups that come near to the ratio."""
    for more in range(count + 1, _MOST_SUBGROUPS):
        share = 1 - resident(asked, more) / more
        if abs(share - asked) <= _NEAR:
            size = int(float(f"{params / more:.3g}"))
            return (
                f'smaller subgroups split finer: "sub_group_size": {size} makes about {more} of them, a share of '
                f"{share:.2f} (subgroups are whole tensors: a large one may keep it from that)"
            )
    return "smaller subgroups split finer (sub_group_size)"


def pageable_masters(study: Study) -> Finding | None:
    """Updated parameters that go up by a blocking copy from pageable memory, converted on the CPU before it."""
    job, step, iteration = study.deepspeed, study.sub_step("parameters"), study.iteration_ms
    if job is None or job.masters_pinned is not False or not study.offloaded or step is None or not iteration:
        return None
    took, peak = step.median_ms, study.peak_bytes_per_s
    if not step.bytes or took < _LEAST_SHARE * iteration:
        return None
    worth = at_most(took - step.bytes / peak * 1e3) if peak else None
    if worth is not None and worth < _LEAST_SHARE * iteration:
        return None
    carries = f", over a link that carries {rate_text(peak)}" if peak else ""
    evidence = [
        f"`parameters` takes {ms_text(took)} per iteration for {bytes_text(step.bytes)}: "
        f"{rate_text(step.bytes / took * 1e3)}{carries}",
        "DeepSpeed's fp32 masters lie in pageable memory: the CPU converts them, and the copy keeps the host waiting",
    ]
    if step.h2d.pageable_share is not None:
        evidence.append(f"a pageable copy runs for {100 * step.h2d.pageable_share:.0f} % of that time")
    return Finding(
        "pageable-masters",
        "Updated parameters come back through pageable memory",
        worth,
        tuple(evidence),
        f"offload_optimizer.pin_memory pins gradients, not masters; {_ENABLE} keeps them pinned, and uploads overlap",
    )


def passes_beside_adam(study: Study) -> Finding | None:
    """Passes over host memory that one kernel could do on its way: unscaling gradients, converting parameters."""
    update, iteration = study.sub_step("update"), study.iteration_ms
    unscale, parameters = study.sub_step("unscale", ("cpu",)), study.sub_step("parameters")
    whole = study.ms("update")
    if update is None or not update.median_ms or not iteration or not whole:
        return None
    unscaling = unscale.median_ms if unscale is not None else 0.0
    converting = parameters.median_ms if parameters is not None else 0.0
    saved = unscaling + converting
    if study.has_gpu and parameters is not None and parameters.bytes and study.peak_bytes_per_s:
        # The copy itself remains, at best at the link's peak.
        saved = unscaling + at_most(converting - parameters.bytes / study.peak_bytes_per_s * 1e3)
    if saved < _LEAST_PASSES * iteration:
        return None
    evidence = (
        f"`unscale` takes {ms_text(unscaling)} and `parameters` {ms_text(converting)}, beside "
        f"{ms_text(update.median_ms)} of the optimizer's kernel on the CPU",
        f"{100 * max(0.0, 1 - update.median_ms / whole):.0f} % of the update, {ms_text(whole)}, is not that kernel",
    )
    return Finding(
        "passes-beside-adam",
        "The CPU passes over gradients and parameters again beside the optimizer's kernel",
        at_most(saved),
        evidence,
        f"one pass can unscale, update and write the half-precision parameter: {_ENABLE} does",
    )


def gradient_round_trip(study: Study) -> Finding | Unknown | None:
    """Gradients that DeepSpeed takes down in half precision, back up, and down again in fp32."""
    job, params, iteration = study.deepspeed, study.params, study.iteration_ms
    if job is None or job.policy or job.stage != 3 or not study.offloaded or not params or not iteration:
        return None
    down, up = study.phase_link("backward", "d2h"), study.phase_link("backward", "h2d")
    if down is None or down.bytes is None:
        return Unknown(
            "gradient-round-trip",
            "how often do gradients cross the link? DeepSpeed's ZeRO-3 takes them down, up and down again",
            "record copies: ebbtide profile --transfers, or counters of the link",
        )
    # Those of a resident part go down too: their buffers lie on the host, whatever the ratio.
    needed = _GRADIENT_BYTES * params
    if down.bytes < _ROUND_TRIP * needed:
        return None
    # Parameters that are offloaded too go up in the backward, and none of that is the gradients'.
    back = 0.0 if up is None or up.bytes is None or job.zero.get("offload_param") else min(up.bytes, needed)
    costs = [_took_ms(study, down.busy_ms, down.bytes, down.bytes - needed)]
    if back and up is not None and up.bytes:
        costs.append(_took_ms(study, up.busy_ms, up.bytes, back))
    known = [cost for cost in costs if cost is not None]
    worth = at_most(sum(known), study.ms("backward") or iteration) if known else None
    if worth is not None and worth < _LEAST_SHARE * iteration:
        return None
    evidence = (
        f"in the backward {bytes_text(down.bytes)} go down, {down.bytes / params:.1f} B a parameter, and "
        f"{bytes_text(up.bytes if up is not None else None)} up; one copy in half precision is {bytes_text(needed)}",
        "DeepSpeed's ZeRO-3 takes each gradient down, back up, and down again in fp32",
    )
    return Finding(
        "gradient-round-trip",
        "Gradients cross the link more than once",
        worth,
        evidence,
        f"{_ENABLE} takes each down once, in half precision",
    )


def _took_ms(study: Study, busy_ms: float | None, moved: float, part: float) -> float | None:
    """How long a part of what moved took: of the copies' own time, else at the link's peak."""
    if busy_ms is not None:
        return busy_ms * part / moved
    return part / study.peak_bytes_per_s * 1e3 if study.peak_bytes_per_s else None
