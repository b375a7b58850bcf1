"""The workload of a trace, and the policy that the recorded job ran under."""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbtide.analysis.metrics.deepspeed import DeepSpeed, deepspeed_of
from ebbtide.analysis.metrics.devices import capacity_bytes, main_pool, memory_line
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.metrics.recurring_windows import by_place
from ebbtide.analysis.metrics.trace_metrics import Study
from ebbtide.analysis.metrics.windows import pieces as phase_pieces
from ebbtide.analysis.timeseries.thresholds import FreeLine as Line
from ebbtide.errors import WorkloadError
from ebbtide.interleave.model.workload import FreeLine, Workload
from ebbtide.profiler.trace import Trace

# DeepSpeed's own default is 1e9; smaller subgroups overlap better, and larger ones need more room.
_SUBGROUP_PARAMS = 100_000_000
_MOST_STEPS = 32
# Subgroups may hold so much more than the parameters: DeepSpeed pads what it divides among ranks.
_PADDING = 0.1
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def workload_of(trace: Trace) -> Workload:
    """The workload of a trace: medians over its counted iterations, of the slowest rank; what is free is what every
    iteration has free at the same place. Raises WorkloadError where phases or parameters were not recorded."""
    study = Study(trace)
    forward, backward, update = (study.ms(phase) for phase in ("forward", "backward", "update"))
    if forward is None or backward is None or update is None:
        raise WorkloadError(
            f"{trace.path} has no finished iteration with forward, backward and update: nothing to replay"
        )
    if not update:
        raise WorkloadError(f"{trace.path} has no update phase: nothing to replay")
    if not study.params:
        raise WorkloadError(
            f"{trace.path} does not tell how many parameters a rank updates: describe the job in a --workload file"
        )
    param_bytes = _param_bytes(study.entry)
    waited = _waited_ms(study, backward)
    notes = []
    if waited:
        notes.append(
            f"the recorded backward waited some {waited:.0f} ms for gradient copies (an estimate): replayed without"
        )
    # Times are whole nanoseconds: what is less than one is left of a difference.
    lengths = {"other": round(study.ms("other") or 0.0, 6), "forward": forward, "backward": backward - waited}
    free = _free(trace, study, {phase: length / 1e3 for phase, length in lengths.items()})
    if free is None:
        notes.append("what is free on the device is not known")
    shares = {way: _busy(study, way) for way in ("h2d", "d2h")}
    sizes = _sizes(study.deepspeed, int(study.params))
    params = sum(sizes) if sizes else int(study.params)
    # DeepSpeed looks at the norm of all gradients, clipping or not, and skips the step where it is no number: as with
    # torch's own loops and their checks, no update begins before the backward is over.
    return Workload(
        name=trace.name,
        params=params,
        subgroup_params=_subgroup_params(study, params),
        sizes=sizes,
        forward_s=lengths["forward"] / 1e3,
        backward_s=lengths["backward"] / 1e3,
        other_s=lengths["other"] / 1e3,
        param_bytes=param_bytes,
        grad_bytes=param_bytes,
        state_bytes=_state_bytes(study.entry),
        gpu_free=free,
        h2d_busy_share=shares["h2d"],
        d2h_busy_share=shares["d2h"],
        clipping=True,
        notes=tuple(notes),
    )


def recorded_policy(trace: Trace) -> str | None:
    """The policy that a DeepSpeed job ran under: that of ebbtide's engine where it drove the job, else by the
    configuration; None where that is not known.

    `prefetch_optimizer`, `part_grads_async` and `prefetch_optimizer_gap` are the keys of the published implementation
    of interleaving; DeepSpeed's own copies gradients asynchronously from 0.19.5."""
    job = deepspeed_of(trace)
    if job is None:
        return None
    if job.policy is not None:
        return job.policy
    stride = job.offload.get("prefetch_optimizer_gap") if job.offload.get("prefetch_optimizer") else None
    if job.offload.get("device") != "cpu" or job.ratio is None or not isinstance(stride, (int, float, type(None))):
        return None
    asynchronous = job.offload.get("part_grads_async")
    if asynchronous is None:
        asynchronous = _version(job) >= (0, 19, 5)
    if stride:
        return f"interleaved:{int(stride)}@{job.ratio:g},grads={'async' if asynchronous else 'blocking'}"
    name = "zero-offload" if job.ratio == 1 else f"twin-flow:{job.ratio:g}"
    return f"{name},grads={'async' if asynchronous else 'blocking'}"


def _version(job: DeepSpeed) -> tuple[int, ...]:
    numbers = [int(part) for part in (job.version or "0").split("+")[0].split(".") if part.isdigit()]
    return tuple(numbers)


def _waited_ms(study: Study, backward: float) -> float:
    """What of the backward was waiting for gradients to come down."""
    from ebbtide.analysis.findings.gradients import blocking_gradients

    found = blocking_gradients(study)
    worth = getattr(found, "worth_ms", None)
    return min(worth, backward) if worth is not None else 0.0


def _sizes(job: DeepSpeed | None, params: int) -> tuple[int, ...] | None:
    """The subgroups that were recorded, or that the job printed: whole tensors, so they differ. Those of another rank
    or model, which do not hold these parameters, do not count."""
    if job is None or not params <= sum(job.subgroups) <= (1 + _PADDING) * params:
        return None
    return job.subgroups


def _subgroup_params(study: Study, params: int) -> int:
    asked = study.zero.get("sub_group_size")
    size = int(asked) if isinstance(asked, (int, float)) and asked >= 1 else _SUBGROUP_PARAMS
    return min(size, params)


def _param_bytes(entry: dict[str, Any]) -> float:
    kinds = (entry.get("model") or {}).get("dtypes") or {}
    sizes = {kind: _BYTES.get(str(kind).removeprefix("torch."), 2) for kind in kinds}
    return float(sizes[max(kinds, key=lambda kind: kinds[kind])]) if kinds else 2.0


def _state_bytes(entry: dict[str, Any]) -> float:
    """An fp32 master, and as many fp32 moments as the optimizer was seen to have; two where that was not seen."""
    optimizers = entry.get("optimizers") or []
    elements = sum(sum((o.get("state_dtypes") or {}).values()) for o in optimizers)
    params = sum(o.get("params") or 0 for o in optimizers)
    moments = round(elements / params) if elements and params else 2
    return 4.0 * (1 + max(moments, 0))


def _busy(study: Study, direction: str) -> float:
    """What the job itself takes of the link: its share in the forward, in which no optimizer state moves."""
    use = study.phase_link("forward", direction)
    share = use.share_of_peak if use is not None else None
    return min(max(share or 0.0, 0.0), 0.9)


def _free(trace: Trace, study: Study, lengths: dict[str, float]) -> FreeLine | None:
    """What is free beside the job's own memory, in the order other, forward, backward, update: the least over all
    iterations. State that the recorded job kept on the device counts as free: where it lies is the policy's to say.
    lengths: of the phases as they are replayed, s."""
    pool, rank = main_pool(trace), trace.ranks[0]
    capacity = capacity_bytes(trace, rank)
    if pool is None or capacity is None or not study.has_gpu:
        return None
    times, used = memory_line(trace, rank, pool)
    if not len(times):
        return None
    own = _state_on_device(trace, study)
    line = Line(times, capacity - used + own)
    peaks = capacity + own - phase_peaks(trace, rank, pool)
    peaks = peaks[peaks.index.isin(study.counted)]
    least = {phase: float(peaks[phase].min()) for phase in peaks.columns}
    table = phase_pieces(trace, rank, line)
    table = table[table["iteration"].isin(study.counted)]
    begins = lengths["other"]
    found = [(0.0, least["other"])] if begins else []
    for phase in ("forward", "backward"):
        places = [place for place in by_place(table) if place.phase == phase]
        # Micro-steps before the last are long over when the optimizer has anything to move.
        if len(places) == 1:
            found += [(begins + lengths[phase] * at, size) for at, size in _steps(places[0].lowest(line))]
        else:
            found.append((begins, least[phase]))
        begins += lengths[phase]
    found.append((begins, least["update"]))
    known = [(at, max(0.0, size)) for at, size in found if not np.isnan(size)]
    # Before the first entry nothing is known to be free.
    return ((0.0, 0.0), *known) if known and known[0][0] > 0 else tuple(known) or None


def _steps(envelope: tuple[Any, Any]) -> list[tuple[float, float]]:
    """A step function on [0, 1) with at most so many steps: of neighbours the least counts."""
    places, values = envelope
    if len(places) <= _MOST_STEPS:
        return [(float(at), float(value)) for at, value in zip(places, values, strict=True)]
    edges = np.linspace(0, 1, _MOST_STEPS + 1)[:-1]
    first = np.maximum(np.searchsorted(places, edges, side="right") - 1, 0)
    after = np.append(np.searchsorted(places, edges[1:], side="left"), len(places))
    return [(float(e), float(values[a : max(b, a + 1)].min())) for e, a, b in zip(edges, first, after, strict=True)]


def _state_on_device(trace: Trace, study: Study) -> int:
    if study.deepspeed is not None and study.deepspeed.offload:
        return round((1 - study.deepspeed.cpu_share) * 12 * (study.params or 0))
    places = [str(place) for o in study.entry.get("optimizers") or [] for place in o.get("state_devices") or []]
    if any(place.startswith("cuda") for place in places):
        return sum(o.get("state_bytes") or 0 for o in study.entry.get("optimizers") or [])
    return 0
