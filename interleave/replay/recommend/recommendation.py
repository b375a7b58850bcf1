"""The recommended setup: the best policy, and what to paste for each policy that fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recommend.alternatives import alternatives
from ebbtide.interleave.replay.recommend.choice import choose_policy
from ebbtide.interleave.replay.recommend.configuration import placeholders
from ebbtide.interleave.replay.recommend.overlap_choice import (
    DEEPSPEED_OVERLAP,
    OPTIMIZER_OVERLAP,
    choose_overlap,
)
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.interleave.replay.recommend.setups import PolicySetup, overlapped_setup, setup_of
from ebbtide.interleave.replay.recommend.systems import SystemSetup, other_systems
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.machine import Machine

# A smaller gain is not worth a change of policy.
_MIN_GAIN = 0.02


@dataclass(frozen=True)
class Recommendation:
    """The recommended setup.

    Attributes:
        policy: The best policy that fits.
        line: The recommendation in one line.
        deepspeed: The section zero_optimization for the best that DeepSpeed itself can do; None if none of it fits.
        code: Lines of Python that make a DeepSpeed job use the policy; None if nothing should be offloaded.
        deepspeed_config: The configuration of DeepSpeed for the policy.
        optimizer_code: Lines of Python for a job without DeepSpeed; None if nothing should be offloaded.
        setups: The lines to paste for each policy that fits: the recommended one, then the others, fastest first.
        placeholders: Keys of the configurations whose values stand for values of the job that are not known.
        alternatives: Changes to the job after which nothing would have to be offloaded.
        uncertainty: The known accuracy of predictions from the machine, in a sentence.
        left_out: Policies without a setup, and why.
        systems: Other systems that are faster, and the best fraction of Megatron-LM.
        overlap: What updates beside the step win; None if it is little.
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

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide replay --json` prints."""
        return asdict(self)


def recommend(
    workload: Workload, machine: Machine, job: RecordedJob | None = None, machine_source: str | None = None
) -> Recommendation:
    """Recommend the best policy that fits, and what DeepSpeed can do of it today.

    Args:
        workload: The workload.
        machine: The machine.
        job: Settings of the job that the lines repeat.
        machine_source: The file or preset of the machine, for the lines of Python.

    Raises:
        MachineError: The machine lacks a rate that the best policy needs.
    """
    return _Recommender(workload, machine, job or RecordedJob(), machine_source).recommendation()


@dataclass(frozen=True)
class _Recommender:
    workload: Workload
    machine: Machine
    job: RecordedJob
    machine_source: str | None

    def recommendation(self) -> Recommendation:
        choice = choose_policy(self.workload, self.machine)
        best, static = choice.best, choice.split
        if best.plan.policy == "gpu-only":
            return self._without_offload(best)
        deepspeed = choose_overlap(best, DEEPSPEED_OVERLAP, self.workload, self.machine)
        overlap = deepspeed
        if self.job.stage is None:
            overlap = choose_overlap(best, OPTIMIZER_OVERLAP, self.workload, self.machine)
        plan, iteration_s = best.plan, best.iteration_s
        if overlap is not None:
            plan, iteration_s = overlap.steps.valid.plan, overlap.iteration_s
        policy = plan.policy
        line = f"{policy}: {iteration_s * 1e3:,.0f} ms an iteration"
        if plan.remark:
            line += f" ({plan.remark})"
        if overlap is not None:
            line += f"; {overlap.text()}"
        if static is not None and static.iteration_s < (1 + _MIN_GAIN) * iteration_s:
            line = f"nothing to gain by another policy; {line}"
        if choice.excess:
            line += f"; it does not fit: {choice.excess}"
        section: dict[str, Any] | None = None
        if static is not None:
            section = self._setup(static).deepspeed_config["zero_optimization"]
            line += f"; {static.plan.policy} in plain DeepSpeed: {static.iteration_s * 1e3:,.0f} ms"
        if self.job.stage in (1, 2):
            line += f"; {policy} needs zero_optimization.stage 3: this job has stage {self.job.stage}"
        if self.job.offloads_params:
            line += f"; {policy} in a DeepSpeed job needs offload_param to be off"
        setups = tuple(self._setup(schedule) for schedule in (best, *choice.others))
        if overlap is not None:
            beside = overlapped_setup(overlap, deepspeed, setups[0], self.job, self.machine, self.machine_source)
            setups = (beside, *setups)
        advice = self._assemble(
            line, section, setups, alternatives(self.workload, self.machine, self.job), choice.left_out
        )
        # Where the best policy does not fit, any system that does is better.
        limit_s = inf if choice.excess else iteration_s
        advice = replace(advice, systems=other_systems(self.workload, self.machine, self.job, limit_s))
        return advice if overlap is None else replace(advice, overlap=overlap.as_json())

    def _setup(self, schedule: Schedule) -> PolicySetup:
        return setup_of(schedule, self.job, self.machine, self.machine_source)

    def _without_offload(self, on_gpu: Schedule) -> Recommendation:
        state_gb = self.workload.state_bytes * self.workload.params / 1e9
        line = (
            f"do not offload: the optimizer's state ({state_gb:.1f} GB a rank) fits on the device all the time; "
            f"an iteration takes {on_gpu.iteration_s * 1e3:,.0f} ms then"
        )
        return self._assemble(line, None, (self._setup(on_gpu),), (), {})

    def _assemble(
        self,
        line: str,
        section: dict[str, Any] | None,
        setups: tuple[PolicySetup, ...],
        changes: tuple[str, ...],
        left_out: dict[str, str],
    ) -> Recommendation:
        best = setups[0]
        return Recommendation(
            policy=best.policy,
            line=line,
            deepspeed=section,
            code=best.code,
            deepspeed_config=best.deepspeed_config,
            optimizer_code=best.optimizer_code,
            setups=setups,
            placeholders=tuple(placeholders(self.workload, self.job)),
            alternatives=changes,
            uncertainty=accuracy_of(self.machine).text(),
            left_out=left_out,
        )
