"""The recommended setup: the best policy, and what to paste for each policy that
fits."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

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
from ebbtide.features.advise.present import MIN_GAIN
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.machine import Machine, unified_memory_text


@dataclass(frozen=True)
class PresentJob:
    """The job as it is on the machine; None: not known, or it does not fit there."""

    policy: str | None
    iteration_ms: float | None  # Simulated, where the policy is known; else recorded.
    recorded_ms: float | None


@dataclass(frozen=True)
class Recommendation:
    """The recommended setup."""

    policy: str
    line: str
    # Lines of Python that make a DeepSpeed job use the policy; None if nothing should
    # be offloaded.
    code: str | None
    deepspeed_config: dict[str, Any]
    optimizer_code: str | None
    # The lines to paste for each policy that fits: the recommended one, then the
    # others, fastest first.
    setups: tuple[PolicySetup, ...]
    # Keys of the configurations whose values stand for values of the job that are not
    # known.
    placeholders: tuple[str, ...]
    present: PresentJob
    # Changes to the job after which nothing would have to be offloaded.
    alternatives: tuple[str, ...]
    uncertainty: str
    left_out: dict[str, str]
    systems: tuple[SystemSetup, ...] = ()
    # What updates beside the step win; None if it is little.
    overlap: dict[str, Any] | None = None
    # What keeps the job from using the policy as it is: memory, other settings.
    warnings: tuple[str, ...] = ()
    # The best static split, which DeepSpeed has by itself; None if none fits, or is
    # worth a change.
    split: PolicySetup | None = None
    # The setting to change, as in findings; None: nothing is gained, or fits.
    action: dict[str, Any] | None = None
    # Whether the job fits as it is, and nothing is worth a change.
    is_as_today: bool = False

    @property
    def deepspeed(self) -> dict[str, Any] | None:
        """The section zero_optimization of `split`, the best that DeepSpeed itself can
        do; None if none of it fits."""
        return (
            None
            if self.split is None
            else self.split.deepspeed_config["zero_optimization"]
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide replay --json` prints."""
        return {**asdict(self), "deepspeed": self.deepspeed, "advice": self.action}


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
    present, advice = choice.present, choice.advice
    best, overlap = best_setup(choice, context), choice.overlap
    changes: tuple[str, ...] = ()
    systems: tuple[SystemSetup, ...] = ()
    warnings: tuple[str, ...] = ()
    setups = [best]
    if best.policy == "gpu-only":
        state_gb = workload.state_bytes * workload.params / 1e9
        line = (
            f"do not offload: the optimizer's state ({state_gb:.1f} GB a rank) fits on "
            "the device all the time; "
            f"an iteration takes {best.iteration_ms:,.0f} ms then"
        )
        if choice.excess:
            line = f"do not offload; the job does not fit: {choice.excess}"
        line = "; ".join(filter(None, (line, unified_memory_text(machine))))
    else:
        warnings = tuple(_warnings(choice, context.job))
        line = _line(choice, warnings)
        changes = alternatives(workload, machine, context.job, present)
        # Where the best policy does not fit, any system that does is better.
        systems = other_systems(
            workload, context, inf if choice.excess else choice.steps.rating_s, present
        )
        others = choice.others if overlap is None else (choice.best, *choice.others)
        setups += [setup_of(steps, context) for steps in others]
    gains = choice.split is not None and present.is_slower_than(choice.split)
    split = (
        setup_of(choice.split, context) if choice.split is not None and gains else None
    )
    return Recommendation(
        policy=best.policy,
        line=line,
        code=best.code,
        deepspeed_config=best.deepspeed_config,
        optimizer_code=best.optimizer_code,
        setups=tuple(setups),
        placeholders=tuple(placeholders(workload, context.job)),
        present=PresentJob(
            None if present.steps is None else present.steps.plan.policy,
            None if present.iteration_s is None else present.iteration_s * 1e3,
            None if present.recorded_s is None else present.recorded_s * 1e3,
        ),
        alternatives=changes,
        uncertainty=accuracy_of(machine).text(),
        left_out=choice.left_out,
        systems=systems,
        overlap=None if overlap is None else overlap.as_json(),
        warnings=warnings,
        split=split,
        action=None if advice is None else advice.as_json(),
        is_as_today=advice is None and choice.excess is None,
    )


def _line(choice: PolicyChoice, warnings: Sequence[str]) -> str:
    """Return the recommendation of a policy that offloads, in one line."""
    steps, plan, split = choice.steps, choice.steps.plan, choice.split
    line = f"{plan.policy}: {steps.iteration_s * 1e3:,.0f} ms an iteration"
    if plan.remark:
        line += f" ({plan.remark})"
    if choice.overlap is not None:
        line += f"; {choice.overlap.text()}"
    if choice.advice is None and not choice.excess:
        line = f"nothing is worth a change of what the job has; {line}"
    elif split is not None and split.rating_s < (1 + MIN_GAIN) * steps.rating_s:
        line = f"nothing to gain by another policy; {line}"
    if split is not None:
        line += (
            f"; {split.plan.policy} in plain DeepSpeed: {split.iteration_s * 1e3:,.0f} "
            "ms"
        )
    return "; ".join((line, *warnings))


def _warnings(choice: PolicyChoice, job: RecordedJob) -> Iterator[str]:
    policy = choice.steps.plan.policy
    if choice.excess:
        yield f"it does not fit: {choice.excess}"
    if job.stage in (1, 2):
        yield (
            f"{policy} needs zero_optimization.stage 3: this job has stage {job.stage}"
        )
    if job.offloads_params:
        yield f"{policy} in a DeepSpeed job needs offload_param to be off"
