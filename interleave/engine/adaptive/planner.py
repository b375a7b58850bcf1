"""Makes plans from the rates and phases that the steps of a job show, and decides when
a new plan is due."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ebbtide.interleave.engine.adaptive.rates import (
    WEIGHT,
    correct_rates,
    planning_rates,
)
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.options import Budget
from ebbtide.interleave.engine.runtime.arena import plan_bytes, worst_case
from ebbtide.interleave.engine.runtime.layout import (
    Subgroup,
    most_frequent,
    state_elements,
)
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule, needed_host_bytes
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.interleave.policies import Policy
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, FORWARD, UPDATE
from ebbtide.state_bytes import STATE_BYTES
from ebbtide.units import bytes_text

# The change of the share of clipped steps that calls for a new plan, and the weight of
# the last step in it.
_CLIP_DRIFT, _CLIP_WEIGHT = 0.15, 0.05
# The weight of the last step in the share of early copies that are made again, without
# such copies its decrease in a step, and the shares that end and begin them.
_STALE_WEIGHT, _RETRY_WEIGHT = 0.1, 0.01
_MAX_STALE, _MIN_STALE = 0.5, 0.25
# Minimum number of steps between two plans: the first and the largest value.
_PATIENCE, _MAX_PATIENCE = 3, 96


# A new plan is due if rates, phases or memory differ by more than this share from the
# last plan's.
_DRIFT = 0.15
# If they differ by more than this share, the patience below does not count.
_LEAP = 0.5
# Planning, which delays the step, takes at most this share of the time.
_PLANNING_SHARE = 0.01
# Number of steps until phases and rates are typical of the job.
_WARM_UP_STEPS = 2


class Planner:
    """Makes plans for a running job, with supported overlaps alone, and new ones for
    policies that depend on rates.

    `machine` has the first rates, then the rates corrected by the steps so far."""

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        subgroups: Sequence[Subgroup],
        gradients: str,
        supported: Overlap = NO_OVERLAP,
    ) -> None:
        policy.refuse_simulation_only()
        self.policy = policy
        self._supported = supported
        self.machine = machine
        self._subgroups = subgroups
        width = max((subgroup.dtype.itemsize for subgroup in subgroups), default=2)
        sizes = tuple(subgroup.params for subgroup in subgroups)
        master: Any = most_frequent(subgroups, lambda own: own.rule.master, "fp32")
        self.workload = Workload(
            name="this job",
            params=sum(sizes),
            subgroup_params=max(sizes, default=1),
            sizes=sizes,
            forward_s=0.0,
            backward_s=0.0,
            param_bytes=width,
            grad_bytes=width,
            state_bytes=_mean_state_bytes(subgroups),
            master=master,
            gradients_held_until_step=gradients != "streamed",
            copies_gradients_early=gradients == "copied",
            in_own_engine=True,
        )
        self._planned: tuple[Workload, Machine, Budget | None] | None = None
        self._may_copy_early = gradients == "copied"
        # The share of the gradients copied early that had to be copied again.
        self._stale_share = 0.0
        self._steps = 0
        # Device memory that the last plan may use.
        self.needed_bytes = 0.0
        self._counts: dict[str, int] = {}
        # The number of steps before the last plan.
        self._planned_step = 0
        self._patience = _PATIENCE
        # The time of the last plan, on the clock of time.perf_counter, and how long
        # planning took.
        self._planned_s = 0.0
        self._planning_s = 0.0

    def plan(self, budget: Budget | None) -> Plan:
        """Make a plan from the rates and phases measured so far. Raises as `make_plan`,
        and EngineError if it needs more device memory than the budget for state (None:
        no limit)."""
        begin_s = self._planned_s = time.perf_counter()
        # Also where there is no plan, so that the next one waits.
        self._planned_step = self._steps
        plan, needed_bytes = self._plan_and_bytes(budget)
        # `adaptive` fits phases by its own rates: with the slow link of the worst case
        # it would use no window.
        limit = max_budget(budget) if self.policy.is_adaptive else min_budget(budget)
        for smaller in self._smaller_budgets(budget, limit, needed_bytes):
            if limit is None or needed_bytes <= limit:
                break
            plan, needed_bytes = self._plan_and_bytes(smaller)
            self.workload = replace(
                self.workload, gpu_free=_free_memory(budget, self.workload)
            )
        self._planned = (self.workload, self.machine, budget)
        if limit is not None and needed_bytes > limit:
            raise EngineError(
                f"policy {self.policy} needs {bytes_text(needed_bytes)} of device "
                "memory, more than "
                f"the budget of {budget} bytes: choose smaller subgroups, a policy "
                "that needs less, or `adaptive`"
            )
        self.needed_bytes = needed_bytes
        # Rates that only fluctuate give the same plan again: then wait longer before
        # the next one.
        counts = plan.counts()
        self._patience = (
            min(2 * self._patience, _MAX_PATIENCE)
            if counts == self._counts
            else _PATIENCE
        )
        self._counts = counts
        self._planned_s = time.perf_counter()
        self._planning_s = self._planned_s - begin_s
        return plan

    def _smaller_budgets(
        self, budget: Budget | None, limit: float | None, needed_bytes: float
    ) -> list[float]:
        """Return what to plan with if a plan needs more than its budget."""
        if isinstance(budget, Mapping):
            return [float(min(budget.values()))]
        if not self.policy.is_adaptive or not limit or not needed_bytes:
            return []
        # Blocks that uneven subgroups share are larger than most states in them.
        return [limit * limit / needed_bytes, 0.0]

    def _plan_and_bytes(self, budget: Budget | None) -> tuple[Plan, float]:
        """Return a plan, and the device memory that it may use, in bytes."""
        self.workload = replace(
            self.workload, gpu_free=_free_memory(budget, self.workload)
        )
        # A rank that has only empty shards has nothing to choose.
        policy = self.policy if self.workload.params else Policy.make("zero-offload")
        plan = policy.plan(self.workload, self.machine)
        available, needed = (
            self.machine.host_memory_bytes,
            needed_host_bytes(plan, self.workload),
        )
        if self.machine.storage and available is not None and needed > available:
            raise EngineError(
                f"policy {self.policy} needs {bytes_text(needed)} of host memory "
                "besides storage, "
                f"more than host_memory_budget, {bytes_text(available)}: choose "
                "smaller subgroups, or more memory"
            )
        if any(op.kind == "cast" and op.resource == "gpu" for op in plan.ops):
            raise EngineError(
                f"policy {self.policy}: the update here writes half-precision "
                "parameters, so that none are converted "
                "on the GPU: choose params=pipelined or params=blocking"
            )
        if plan.speculated and not self._supported.backward:
            raise EngineError(
                f"policy {self.policy}: updates inside the backward are not supported "
                "here: choose overlap=none or "
                "overlap=forward"
            )
        if plan.has_late_updates and not self._supported.forward:
            raise EngineError(
                f"policy {self.policy}: updates under the next forward need the module "
                "whose forward waits for them: "
                "InterleavedAdamW(..., overlap='forward', model=model)"
            )
        schedule = worst_case(plan, self.workload)
        return plan, max(
            schedule.peak_device_bytes, plan_bytes(schedule, self._subgroups)
        )

    def continue_from(self, other: "Planner") -> None:
        """Take the phases that another planner of the same job has observed."""
        self._steps, self._stale_share = other._steps, other._stale_share
        phases = {
            name: getattr(other.workload, name)
            for name in (
                *("forward_s", "backward_s", "clip_active_share"),
                "copies_gradients_early",
            )
        }
        self.workload = replace(self.workload, **phases)

    def observe(self, schedule: Schedule) -> None:
        """Update phases and rates from the measured schedule of a step."""
        self._steps += 1
        if self._steps <= _WARM_UP_STEPS:
            return
        job = schedule.workload
        is_first = self._steps == _WARM_UP_STEPS + 1
        self.workload = replace(
            self.workload,
            forward_s=_smoothed(self.workload.forward_s, job.forward_s, is_first),
            backward_s=_smoothed(self.workload.backward_s, job.backward_s, is_first),
        )
        self.machine = correct_rates(self.machine, schedule)

    def observe_clipping(self, is_active: bool) -> None:
        """Update the share of steps in which clipping changes updates.

        Steps that are skipped count, too.
        """
        share = self.workload.clip_active_share
        self.workload = replace(
            self.workload, clip_active_share=share + _CLIP_WEIGHT * (is_active - share)
        )

    def observe_copies(self, stale_share: float | None) -> None:
        """Update the share of gradients that change after their early copies.

        Plans have no such copies while it is large; after some steps they are tried
        again. None: the step had none.
        """
        if not self._may_copy_early:
            return
        copies = self.workload.copies_gradients_early
        if stale_share is not None:
            self._stale_share += _STALE_WEIGHT * (stale_share - self._stale_share)
        elif not copies:
            self._stale_share *= 1 - _RETRY_WEIGHT
        if self._stale_share > _MAX_STALE or self._stale_share < _MIN_STALE:
            self.workload = replace(
                self.workload, copies_gradients_early=self._stale_share < _MIN_STALE
            )

    def replan_reason(self, budget: Budget | None) -> str | None:
        """Return why a new plan is due; None if it is not."""
        if self._planned is None:
            return None
        job, machine, planned_budget = self._planned
        if job.copies_gradients_early != self.workload.copies_gradients_early:
            change = "change" if job.copies_gradients_early else "may stay the same"
            return f"gradients {change} between the backward and the step"
        if not self.policy.depends_on_rates or self._steps <= _WARM_UP_STEPS:
            return None
        limit = max_budget(budget)
        if _budgets_differ(budget, planned_budget, _DRIFT) or (
            limit is not None and limit < self.needed_bytes
        ):
            return (
                f"device memory for state went from {planned_budget} to {budget} bytes"
            )
        if not job.compute_s:
            return "the phases of the job are measured now"
        steps = self._steps - self._planned_step
        if (
            steps < _PATIENCE
            or (time.perf_counter() - self._planned_s) * _PLANNING_SHARE
            < self._planning_s
        ):
            return None
        # Fluctuations wait for the full patience; leaps do not.
        drift = _DRIFT if steps >= self._patience else _LEAP
        return self._drift(job, machine, drift)

    def _drift(self, job: Workload, machine: Machine, drift: float) -> str | None:
        """Return which rate or phase differs from a plan's by more than a share."""
        rates = planning_rates(self.machine)
        for key, before in planning_rates(machine).items():
            now = rates[key]
            if before and now and max(now / before, before / now) > 1 + drift:
                return f"{key} went from {before:.3g} to {now:.3g}"
        for key in ("forward_s", "backward_s"):
            before, now = getattr(job, key), getattr(self.workload, key)
            if abs(now - before) > drift * job.compute_s:
                return f"{key} went from {before:.3g} to {now:.3g}"
        before, now = job.clip_active_share, self.workload.clip_active_share
        if self._supported.backward and abs(now - before) > _CLIP_DRIFT:
            return f"the share of clipped steps went from {before:.2f} to {now:.2f}"
        return None


def _mean_state_bytes(subgroups: Sequence[Subgroup]) -> float:
    """Return the bytes of state per parameter.

    With several rules, it is the mean over all parameters.
    """
    nbytes = torch.float32.itemsize * sum(map(state_elements, subgroups))
    params = sum(own.params for own in subgroups)
    return nbytes / params if params else STATE_BYTES


def _smoothed(old: float, new: float, is_first: bool) -> float:
    return new if is_first else old + WEIGHT * (new - old)


def min_budget(budget: Budget | None) -> float | None:
    """Return what state may use at every moment, in bytes; None for no limit."""
    return min(map(float, budget.values())) if isinstance(budget, Mapping) else budget


def max_budget(budget: Budget | None) -> float | None:
    """Return what state may use at some moment, in bytes; None for no limit."""
    return max(map(float, budget.values())) if isinstance(budget, Mapping) else budget


def _budgets_differ(
    budget: Budget | None, other: Budget | None, tolerance: float
) -> bool:
    """Return whether two budgets differ by more than a share of the larger one; by any
    amount, if one is by phase or None."""
    if (
        isinstance(budget, Mapping)
        or isinstance(other, Mapping)
        or budget is None
        or other is None
    ):
        return budget != other
    return abs(budget - other) > tolerance * max(budget, other)


def _free_memory(budget: Budget | None, workload: Workload) -> FreeMemorySteps:
    """Return a budget as the free memory over an iteration of a workload."""
    if budget is None:
        # More than all state and gradients need.
        budget = 2 * (workload.state_bytes + workload.grad_bytes) * workload.params
    if not isinstance(budget, Mapping):
        return ((0.0, float(budget)),)
    free_from: dict[float, float] = {}
    begin_s = 0.0
    for phase, length_s in (
        (FORWARD, workload.forward_s),
        (BACKWARD, workload.backward_s),
        (UPDATE, 0.0),
    ):
        # Phases without a length begin at the same time: the smallest budget of them
        # counts.
        free_from[begin_s] = min(budget[phase], free_from.get(begin_s, budget[phase]))
        begin_s += length_s
    return tuple(sorted(free_from.items()))
