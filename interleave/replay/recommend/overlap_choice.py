"""The gain of updates beside the step over the recommended policy, and where its lines can ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import POLICIES, parse
from ebbtide.interleave.replay.recommend.candidates import steps_of
from ebbtide.interleave.simulation.steps import Steps
from ebbtide.machines.machine import Machine

# The widest overlap that InterleavedAdamW takes, and `enable` for DeepSpeed.
OPTIMIZER_OVERLAP = "auto"
DEEPSPEED_OVERLAP = "forward"
# A smaller gain is not worth an update beside the step.
_MIN_GAIN = 0.02


@dataclass(frozen=True)
class OverlapChoice:
    """A policy with updates beside the step, compared with the same policy without.

    Attributes:
        policy: The string of the policy without overlap.
        option: The value of its option `overlap`.
        steps: The schedules with overlap.
        without_s: The iteration without overlap, s.
    """

    policy: str
    option: str
    steps: Steps
    without_s: float

    @property
    def iteration_s(self) -> float:
        """The mean iteration with overlap, s."""
        return self.steps.mean("iteration_s")

    @property
    def most_clipped(self) -> float | None:
        """The share of clipped steps up to which the plan is no slower than without overlap; None: whatever it is.

        A plan that is made for another share speculates as much as pays there.
        """
        valid_s = self.steps.valid.iteration_s
        redone_s = self.steps.redone.iteration_s if self.steps.redone is not None else valid_s
        return None if redone_s <= self.without_s else max(0.0, (self.without_s - valid_s) / (redone_s - valid_s))

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the choice, for `ebbtide replay --json`."""
        return {
            "policy": self.policy,
            "overlap": self.option,
            "iteration_ms": self.iteration_s * 1e3,
            "without_overlap_ms": self.without_s * 1e3,
            "speculated_subgroups": len(self.steps.valid.plan.speculated),
            "most_clipped_share": self.most_clipped,
        }

    def text(self) -> str:
        """Return the gain in a sentence without an end."""
        gain_s = self.without_s - self.iteration_s
        plan = self.steps.valid.plan
        kinds = {"under the next forward": plan.has_late_updates, "inside the backward": bool(plan.speculated)}
        where = " and ".join(kind for kind, is_used in kinds.items() if is_used)
        percent = 100 * gain_s / self.without_s
        text = f"updates {where} win {gain_s * 1e3:,.0f} ms ({percent:.0f} %) over {self.policy} alone"
        if not plan.speculated:
            return text
        share = self.steps.valid.workload.clip_active_share
        text += f" if {100 * share:.0f} % of the steps are clipped"
        if self.most_clipped is not None:
            text += f", and something up to {100 * self.most_clipped:.0f} %"
        return text


def choose_overlap(best: Schedule, option: str, workload: Workload, machine: Machine) -> OverlapChoice | None:
    """Return the overlap of a policy; None if the policy has no such option, does not fit with it, or gains little.

    Args:
        best: The schedule of the policy without overlap.
        option: The value of the option `overlap` that the job can run.
        workload: The workload.
        machine: The machine.
    """
    policy = best.plan.policy
    if option not in POLICIES[parse(policy).name].options.get("overlap", ()) or option == "none":
        return None
    steps = steps_of(f"{policy},overlap={option}", workload, machine)
    if steps is None:
        return None
    choice = OverlapChoice(policy, option, steps, best.iteration_s)
    exceeds_device, exceeds_host, iteration_s = steps.cost(machine)
    fits = not (exceeds_device or exceeds_host)
    return choice if fits and iteration_s * (1 + _MIN_GAIN) < best.iteration_s else None
