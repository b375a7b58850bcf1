"""The recommended setup: the best policy, and the lines for each one that fits."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from typing import Any, Literal

from ebbtide.analysis.metrics.advice import MIN_GAIN, Advice, IterationGain
from ebbtide.features.advise.advice import deepspeed_advice, policy_advice
from ebbtide.features.advise.changes import alternatives
from ebbtide.features.advise.choice import PolicyChoice, choose_policy
from ebbtide.features.advise.lines.setups import (
    PasteContext,
    PolicySetup,
    best_setup,
    placeholders,
    setup_of,
)
from ebbtide.features.advise.lines.systems import SystemSetup, other_systems
from ebbtide.features.advise.present import Present
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.machine import Machine, unified_memory_text

# Frameworks that lines to paste are printed for.
Framework = Literal["deepspeed", "script"]


@dataclass(frozen=True)
class Recommendation:
    """The recommended setup of a job on a machine. What few readers need is computed
    when it is first used."""

    workload: Workload
    context: PasteContext
    choice: PolicyChoice
    framework: Framework = "deepspeed"  # What the job trains with.
    baseline: str | None = None  # The policy that stands for the job; None: its own.

    @property
    def present(self) -> Present:
        """The job as it is on the machine."""
        return self.choice.present

    @cached_property
    def advice(self) -> Advice | None:
        """The setting to change; None: nothing is gained, or fits."""
        return policy_advice(self.choice, self.context)

    @cached_property
    def split_advice(self) -> Advice | None:
        """The best static split, which DeepSpeed has by itself; None if none fits, or
        is worth a change."""
        split = self.choice.split
        if split is None:
            return None
        return deepspeed_advice(split, self.present, self.context)

    @cached_property
    def best(self) -> PolicySetup:
        """The lines to paste for the recommended policy."""
        return best_setup(self.choice, self.context)

    @property
    def gain(self) -> IterationGain:
        """The iterations of the recommended policy and of the job as it is."""
        return self.present.gain(self.choice.steps)

    @property
    def lines(self) -> Mapping[str, str]:
        """The lines to paste for the advice, by framework, or for the policy that is
        best although it does not fit."""
        return self.best.blocks() if self.advice is None else self.advice.lines

    @property
    def is_split(self) -> bool:
        """Whether the recommended policy is the best static split itself."""
        return self.split is not None and self.split.policy == self.policy

    @property
    def policy(self) -> str:
        """The recommended policy."""
        return self.best.policy

    @property
    def keeps_on_device(self) -> bool:
        """Whether nothing should be offloaded."""
        return self.policy == "gpu-only"

    @property
    def is_as_today(self) -> bool:
        """Whether the job fits as it is, and nothing is worth a change."""
        return self.advice is None and self.choice.excess is None

    @cached_property
    def setups(self) -> tuple[PolicySetup, ...]:
        """The lines for each policy that fits: the best one, then the fastest first."""
        if self.keeps_on_device:
            return (self.best,)
        choice = self.choice
        plain = () if choice.overlap is None else (choice.best,)
        others = (*plain, *choice.others)
        return self.best, *(setup_of(steps, self.context) for steps in others)

    @cached_property
    def split(self) -> PolicySetup | None:
        """The lines to paste for `split_advice`."""
        split = self.choice.split
        if split is None or self.split_advice is None:
            return None
        return setup_of(split, self.context)

    @property
    def deepspeed(self) -> dict[str, Any] | None:
        """The section zero_optimization of `split`, the best that DeepSpeed itself can
        do; None if none of it fits."""
        if self.split is None:
            return None
        section: dict[str, Any] = self.split.deepspeed_config["zero_optimization"]
        return section

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Keys of the configurations whose values are not known."""
        return tuple(placeholders(self.workload, self.context.job))

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """Changes to the job after which nothing would have to be offloaded."""
        if self.keeps_on_device:
            return ()
        return alternatives(
            self.workload, self.context.machine, self.context.job, self.present
        )

    @cached_property
    def systems(self) -> tuple[SystemSetup, ...]:
        """Other systems that are faster, or fit where the best policy does not."""
        if self.keeps_on_device:
            return ()
        # Where the best policy does not fit, any system that does is better.
        best_s = inf if self.choice.excess else self.choice.steps.rating_s
        return other_systems(self.workload, self.context, best_s, self.present)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the job cannot use the policy as it is: memory, settings."""
        if self.keeps_on_device:
            return ()
        job, policy = self.context.job, self.choice.steps.plan.policy
        warnings = []
        if self.choice.excess:
            warnings.append(f"it does not fit: {self.choice.excess}")
        if job.stage in (1, 2):
            warnings.append(
                f"{policy} needs zero_optimization.stage 3: this job has stage "
                f"{job.stage}"
            )
        if job.offloads_params:
            warnings.append(
                f"{policy} in a DeepSpeed job needs offload_param to be off"
            )
        return tuple(warnings)

    @property
    def line(self) -> str:
        """The recommendation in one line."""
        if self.keeps_on_device:
            unified = unified_memory_text(self.context.machine)
            return "; ".join(filter(None, (self._no_offload_text, unified)))
        parts = [self._policy_text, *self.warnings]
        split = self.choice.split
        if split is not None:
            split_ms = f"{split.iteration_s * 1e3:,.0f} ms"
            parts.insert(1, f"{split.plan.policy} in plain DeepSpeed: {split_ms}")
        return "; ".join(parts)

    @property
    def _no_offload_text(self) -> str:
        if self.choice.excess:
            return f"do not offload; the job does not fit: {self.choice.excess}"
        state_gb = self.workload.state_bytes * self.workload.params / 1e9
        return (
            f"do not offload: the optimizer's state ({state_gb:.1f} GB a rank) fits on "
            "the device all the time; "
            f"an iteration takes {self.best.iteration_ms:,.0f} ms then"
        )

    @property
    def _policy_text(self) -> str:
        choice, steps = self.choice, self.choice.steps
        text = f"{steps.plan.policy}: {steps.iteration_s * 1e3:,.0f} ms an iteration"
        if steps.plan.remark:
            text += f" ({steps.plan.remark})"
        if choice.overlap is not None:
            text += f"; {choice.overlap.text()}"
        limit_s = (1 + MIN_GAIN) * steps.rating_s
        if self.is_as_today:
            return f"nothing is worth a change of what the job has; {text}"
        if choice.split is not None and choice.split.rating_s < limit_s:
            return f"nothing to gain by another policy; {text}"
        return text

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide replay --json` prints."""
        present, overlap = self.present, self.choice.overlap
        advice = self.advice and self.advice.as_json()
        return {
            "policy": self.policy,
            "line": self.line,
            "code": self.best.code,
            "deepspeed_config": self.best.deepspeed_config,
            "optimizer_code": self.best.optimizer_code,
            "setups": [asdict(setup) for setup in self.setups],
            "placeholders": self.placeholders,
            "present": {
                "policy": present.policy,
                "iteration_ms": present.iteration_ms,
                "recorded_ms": present.recorded_ms,
            },
            "alternatives": self.alternatives,
            "uncertainty": accuracy_of(self.context.machine).text(),
            "left_out": dict(self.choice.left_out),
            "systems": [asdict(system) for system in self.systems],
            "overlap": overlap and overlap.as_json(),
            "warnings": self.warnings,
            "split": self.split and asdict(self.split),
            "action": advice,
            "is_as_today": self.is_as_today,
            "deepspeed": self.deepspeed,
            "advice": advice,
        }


def recommend(
    workload: Workload,
    machine: Machine,
    job: RecordedJob | None = None,
    machine_source: str | None = None,
) -> Recommendation:
    """Recommend the best policy that fits, with lines to paste. Raises MachineError if
    a needed rate is missing."""
    context = PasteContext(job or RecordedJob(), machine, machine_source)
    choice = choose_policy(workload, machine, context.job)
    return Recommendation(workload, context, choice)
