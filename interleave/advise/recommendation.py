"""The recommended setup: the best policy, and what to paste for each policy that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from ebbtide.analysis.metrics.advice import Setting, SettingKind
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.out_of_memory import OFFLOAD, OutOfMemory, make_remedy
from ebbtide.errors import MachineError, PolicyError, WorkloadError
from ebbtide.interleave.advise.changes import alternatives
from ebbtide.interleave.advise.choice import (
    PolicyChoice,
    best_static_split,
    choose_policy,
    fits_memory,
    without_offload,
)
from ebbtide.interleave.advise.job.inputs import own_machine, share_box
from ebbtide.interleave.advise.job.training_job import RecordedJob, recorded_job
from ebbtide.interleave.advise.job.workload_from_trace import workload_of
from ebbtide.interleave.advise.lines.setups import PasteContext, PolicySetup, best_setup, placeholders, setup_of
from ebbtide.interleave.advise.lines.systems import SystemSetup, other_systems
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import Steps, simulate
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.catalog import preset, presets
from ebbtide.machines.machine import Machine, machine_from
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, ms_text

# A smaller gain is not worth a change of policy.
_MIN_GAIN = 0.02
_POLICY = "pipelined"
# Devices whose memory differs by less than this share count as the same.
_SAME_CAPACITY = 0.05


@dataclass(frozen=True)
class Recommendation:
    """The recommended setup.

    Attributes:
        deepspeed: The section zero_optimization for the best that DeepSpeed itself can do; None if none of it fits.
        code: Lines of Python that make a DeepSpeed job use the policy; None if nothing should be offloaded.
        setups: The lines to paste for each policy that fits: the recommended one, then the others, fastest first.
        placeholders: Keys of the configurations whose values stand for values of the job that are not known.
        alternatives: Changes to the job after which nothing would have to be offloaded.
        overlap: What updates beside the step win; None if it is little.
        warnings: What keeps the job from using the policy as it is: memory, other settings.
        split: The best static split, which DeepSpeed has by itself; None if none fits.
        action: The setting to change, as in findings.
    """

    policy: str
    line: str
    deepspeed: dict[str, Any] | None
    code: str | None
    deepspeed_config: dict[str, Any]
    optimizer_code: str | None
    setups: tuple[PolicySetup, ...]
    placeholders: tuple[str, ...]
    alternatives: tuple[str, ...]
    uncertainty: str
    left_out: dict[str, str]
    systems: tuple[SystemSetup, ...] = ()
    overlap: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    split: PolicySetup | None = None
    action: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide replay --json` prints."""
        return asdict(self)


def recommend(
    workload: Workload, machine: Machine, job: RecordedJob | None = None, machine_source: str | None = None
) -> Recommendation:
    """Recommend the best policy that fits, and what DeepSpeed can do of it today.

    Args:
        job: Settings of the job that the lines repeat.
        machine_source: The file or preset of the machine, for the lines of Python.

    Raises:
        MachineError: The machine lacks a rate that the best policy needs.
    """
    context = PasteContext(job or RecordedJob(), machine, machine_source)
    choice = choose_policy(workload, machine, context.job)
    best, overlap = best_setup(choice, context), choice.overlap
    changes: tuple[str, ...] = ()
    systems: tuple[SystemSetup, ...] = ()
    warnings: tuple[str, ...] = ()
    setups = [best]
    if best.policy == "gpu-only":
        state_gb = workload.state_bytes * workload.params / 1e9
        line = (
            f"do not offload: the optimizer's state ({state_gb:.1f} GB a rank) fits on the device all the time; "
            f"an iteration takes {best.iteration_ms:,.0f} ms then"
        )
    else:
        warnings = tuple(_warnings(choice, context.job))
        line = _line(choice, warnings)
        changes = alternatives(workload, machine, context.job)
        # Where the best policy does not fit, any system that does is better.
        systems = other_systems(workload, context, inf if choice.excess else choice.steps.iteration_s)
        others = choice.others if overlap is None else (choice.best, *choice.others)
        setups += [setup_of(steps, context) for steps in others]
    split = None if choice.split is None else setup_of(choice.split, context)
    return Recommendation(
        policy=best.policy,
        line=line,
        deepspeed=None if split is None else split.deepspeed_config["zero_optimization"],
        code=best.code,
        deepspeed_config=best.deepspeed_config,
        optimizer_code=best.optimizer_code,
        setups=tuple(setups),
        placeholders=tuple(placeholders(workload, context.job)),
        alternatives=changes,
        uncertainty=accuracy_of(machine).text(),
        left_out=choice.left_out,
        systems=systems,
        overlap=None if overlap is None else overlap.as_json(),
        warnings=warnings,
        split=split,
        action=action_of(choice, best),
    )


def action_of(choice: PolicyChoice, setup: PolicySetup) -> dict[str, Any]:
    """Return the setting of a choice as findings and recommendations state it: see `Setting`."""
    if setup.policy == "gpu-only":
        return {"kind": "deepspeed", "settings": {"offload_optimizer": {"device": "none"}}}
    overlap = "none" if choice.overlap is None else choice.overlap.option
    return {"kind": "policy", "settings": {"policy": choice.best.plan.policy, "overlap": overlap}}


def policy_of_action(action: Mapping[str, Any]) -> str:
    """Return the policy with which `ebbtide replay` simulates the `action` of a finding or recommendation.

    Raises:
        PolicyError: The action is none on offload.
    """
    settings = action["settings"]
    if action["kind"] == "policy":
        overlap = settings.get("overlap", "none")
        return settings["policy"] if overlap == "none" else f"{settings['policy']},overlap={overlap}"
    offload = settings.get("offload_optimizer")
    if offload is None:
        raise PolicyError(f"an action on {', '.join(settings)} has no policy")
    return "gpu-only" if offload.get("device") == "none" else f"twin-flow:{offload['ratio']:g}"


def _line(choice: PolicyChoice, warnings: Sequence[str]) -> str:
    """Return the recommendation of a policy that offloads, in one line."""
    plan, iteration_s, split = choice.steps.plan, choice.steps.iteration_s, choice.split
    line = f"{plan.policy}: {iteration_s * 1e3:,.0f} ms an iteration"
    if plan.remark:
        line += f" ({plan.remark})"
    if choice.overlap is not None:
        line += f"; {choice.overlap.text()}"
    if split is not None and split.iteration_s < (1 + _MIN_GAIN) * iteration_s:
        line = f"nothing to gain by another policy; {line}"
    if split is not None:
        line += f"; {split.plan.policy} in plain DeepSpeed: {split.iteration_s * 1e3:,.0f} ms"
    return "; ".join((line, *warnings))


def _warnings(choice: PolicyChoice, job: RecordedJob) -> Iterator[str]:
    policy = choice.steps.plan.policy
    if choice.excess:
        yield f"it does not fit: {choice.excess}"
    if job.stage in (1, 2):
        yield f"{policy} needs zero_optimization.stage 3: this job has stage {job.stage}"
    if job.offloads_params:
        yield f"{policy} in a DeepSpeed job needs offload_param to be off"


class _Job(NamedTuple):
    """The workload of a trace, and its job on its machine."""

    workload: Workload
    context: PasteContext


class TraceAdviser:
    """Recommends settings for the job of a trace, as `ebbtide replay --recommend` does. It simulates when asked."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def deepspeed_setting(self) -> Setting | None:
        """Return the best setting of what DeepSpeed has by itself: no offload, or the fastest static split that fits.

        None where the job cannot be simulated, or no split fits.
        """
        if self._job is None:
            return None
        workload, context = self._job
        on_gpu = without_offload(workload, context.machine)
        steps = on_gpu or best_static_split(workload, context.machine)
        if steps is None or not fits_memory(steps, context.machine):
            return None
        offload = setup_of(steps, context).deepspeed_config["zero_optimization"]["offload_optimizer"]
        text = "do not offload at all"
        if not on_gpu:
            part = f'"offload_optimizer": {{"ratio": {offload["ratio"]:g}}}'
            text = f"keep that part of the optimizer's state on the device (a static split: {part})"
        return self._setting("deepspeed", {"offload_optimizer": offload}, text, steps)

    def policy_setting(self) -> Setting | None:
        """Return the best policy of ebbtide; None where nothing should be offloaded, or the job cannot be simulated.

        It takes seconds: the policy `adaptive` searches for its plan.
        """
        if self._job is None:
            return None
        workload, context = self._job
        try:
            choice = choose_policy(workload, context.machine, context.job)
        except (MachineError, PolicyError):
            return None
        if choice.excess is not None or choice.best.plan.policy == "gpu-only":
            return None
        overlap = "none" if choice.overlap is None else choice.overlap.option
        settings = {"policy": choice.best.plan.policy, "overlap": overlap}
        return self._setting("policy", settings, f'policy "{choice.steps.plan.policy}"', choice.steps)

    @cached_property
    def _job(self) -> _Job | None:
        machine = own_machine(self._trace)
        if machine is None:
            return None
        try:
            context = PasteContext(recorded_job(self._trace), share_box(machine, None, self._trace))
            return _Job(workload_of(self._trace), context)
        except (MachineError, WorkloadError):
            return None

    def _setting(self, kind: SettingKind, settings: dict[str, Any], text: str, steps: Steps) -> Setting:
        iteration_ms = steps.iteration_s * 1e3
        gain_ms = max(0.0, (JobMetrics(self._trace).iteration_ms or 0.0) - iteration_ms)
        return Setting(kind, settings, f"{text} (simulated: {ms_text(iteration_ms)})", iteration_ms, gain_ms)


def with_replayed_offload(trace: Trace, error: OutOfMemory) -> OutOfMemory:
    """Return an error whose remedy of offloaded state is that of a replayed plan, with its iteration time.

    The plan is that of the policy `pipelined`, which updates on the CPU, on the recorded machine or on the preset with
    as much device memory. What it uses on the device is subtracted. The remedy stays as it is where the trace cannot be
    replayed, for example since no iteration was finished.
    """
    bound = next((remedy for remedy in error.remedies if remedy.name == OFFLOAD), None)
    machine = _machine(trace, error.record.capacity_bytes)
    if bound is None or machine is None:
        return error
    try:
        workload = workload_of(trace)
        schedule = simulate(make_plan(_POLICY, workload, machine), workload, machine)
    except (MachineError, PolicyError, WorkloadError):
        return error
    kept = round(schedule.peak_device_bytes)
    reason = (
        f"all optimizer state on the device, minus {bytes_text(kept)} that the policy {_POLICY} uses there; replayed "
        f"on {machine.name}, an iteration takes {ms_text(schedule.iteration_s * 1e3)}"
    )
    remedy = make_remedy(OFFLOAD, max(bound.bytes - kept, 0), error.record, reason)
    remedies = [remedy if other is bound else other for other in error.remedies]
    return replace(error, remedies=sorted(remedies, key=lambda other: -other.bytes))


def _machine(trace: Trace, capacity: int | None) -> Machine | None:
    if trace.meta.machine is not None:
        return machine_from(trace.meta.machine, f"the machine of {trace.path}")
    if not capacity:
        return None
    machines = [preset(name) for name in presets()]
    same = [m for m in machines if m.gpu_memory_bytes and abs(capacity / m.gpu_memory_bytes - 1) <= _SAME_CAPACITY]
    return min(same, key=lambda m: abs(capacity - (m.gpu_memory_bytes or 0)), default=None)
