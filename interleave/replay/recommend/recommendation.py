"""The recommended setup: the best policy, and what to paste for each policy that fits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan, parse
from ebbtide.interleave.replay.recommend.alternatives import alternatives, fits_with_accumulation
from ebbtide.interleave.replay.recommend.calls import enable_code, optimizer_code
from ebbtide.interleave.replay.recommend.candidates import best_static_split, other_schedules, simulated
from ebbtide.interleave.replay.recommend.configuration import deepspeed_config, placeholders
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

# A smaller gain is not worth a change of policy.
_MIN_GAIN = 0.02
# Policies that DeepSpeed has by itself.
_DEEPSPEED_POLICIES = ("zero-offload", "twin-flow", "gpu-only")


@dataclass(frozen=True)
class PolicySetup:
    """The lines to paste for one policy.

    Attributes:
        policy: The policy's string.
        iteration_ms: Its predicted iteration time.
        deepspeed_config: A configuration that `deepspeed.initialize` accepts.
        code: Lines of Python to run before `deepspeed.initialize`; None if the configuration suffices.
        optimizer_code: Lines of Python for a job without DeepSpeed; None for a policy that DeepSpeed has by itself.
    """

    policy: str
    iteration_ms: float
    deepspeed_config: dict[str, Any]
    code: str | None
    optimizer_code: str | None


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
        workload = self.workload
        if workload.gpu_free is not None:
            on_gpu = simulated("gpu-only", workload, self.machine)
            fits = on_gpu is not None and on_gpu.fits_device(self.machine.gpu_memory_bytes)
            if on_gpu is not None and fits and fits_with_accumulation(workload, self.job):
                return self._without_offload(on_gpu)
        policy = "adaptive" if workload.gpu_free is not None else "interleaved:2"
        # A rate that is missing is an error here.
        best = simulate(make_plan(policy, workload, self.machine), workload, self.machine)
        static = best_static_split(workload, self.machine)
        line = f"{policy}: {best.iteration_s * 1e3:,.0f} ms an iteration"
        if best.plan.remark:
            line += f" ({best.plan.remark})"
        if static is not None and static.iteration_s < (1 + _MIN_GAIN) * best.iteration_s:
            line = f"nothing to gain by another policy; {line}"
        excess = self._host_excess(best)
        if excess:
            line += f"; it does not fit: {excess}"
        section: dict[str, Any] | None = None
        if static is not None:
            section = self._setup(static).deepspeed_config["zero_optimization"]
            line += f"; {static.plan.policy} in plain DeepSpeed: {static.iteration_s * 1e3:,.0f} ms"
        if self.job.stage in (1, 2):
            line += f"; {policy} needs zero_optimization.stage 3: this job has stage {self.job.stage}"
        if self.job.offloads_params:
            line += f"; {policy} in a DeepSpeed job needs offload_param to be off"
        others, left_out = self._others(best, static)
        own = self._setup(best)
        return self._assemble(line, section, (own, *others), alternatives(workload, self.job), left_out)

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

    def _others(self, best: Schedule, static: Schedule | None) -> tuple[list[PolicySetup], dict[str, str]]:
        """Return the setups of the other policies that fit, fastest first, and why others have none."""
        setups, left_out = [], {}
        for schedule in other_schedules(best, static, self.workload, self.machine):
            excess = self._host_excess(schedule)
            if excess is None:
                setups.append(self._setup(schedule))
            else:
                left_out[schedule.plan.policy] = excess
        return setups, left_out

    def _setup(self, schedule: Schedule) -> PolicySetup:
        policy = parse(schedule.plan.policy)
        iteration_ms = schedule.iteration_s * 1e3
        if policy.name not in _DEEPSPEED_POLICIES:
            config = deepspeed_config(self.workload, self.job, 1.0)
            call = None if self.job.offloads_params else enable_code(schedule, self._machine_code())
            optimizer = optimizer_code(schedule, self.job, self._machine_code())
            return PolicySetup(policy.text, iteration_ms, config, call, optimizer)
        ratio = {"gpu-only": None, "zero-offload": 1.0}.get(policy.name, float(policy.value or 1.0))
        # Only a split needs stage 3.
        stage = 3 if policy.name == "twin-flow" else self.job.stage or 3
        config = deepspeed_config(self.workload, self.job, ratio, stage)
        return PolicySetup(policy.text, iteration_ms, config, None, None)

    def _machine_code(self) -> str | None:
        """Return an expression for the machine, with the rates for as many ranks on a host as here."""
        if self.machine_source is None:
            return None
        code = f"find_machine({json.dumps(self.machine_source)})"
        return code if self.machine.box is None else f"{code}.for_ranks({self.machine.box.ranks})"

    def _host_excess(self, schedule: Schedule) -> str | None:
        """Return in words by how much host memory is too small; None if it suffices or is not known."""
        host, available = schedule.host_bytes(), self.machine.host_memory_bytes
        if available is not None and host > available:
            return f"it needs {bytes_text(host)} of host memory, and a rank has {bytes_text(available)}"
        pinned, limit = schedule.pinned_bytes(), self.machine.pinned_memory_bytes
        if limit is not None and pinned > limit:
            return f"it needs {bytes_text(pinned)} of pinned host memory, and a rank may pin {bytes_text(limit)}"
        return None
