"""What the optimizer plans with, and when it plans anew: rates and phases as its own steps show them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ebbtide.errors import UserError
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.model.plan import Op, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import FreeLine, Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

# What comes to the device comes at once and leaves slowly: so a plan takes as much of its memory as it ever can.
_CROWDING = Machine(
    name="crowding",
    h2d_bytes_per_s=1e13,
    d2h_bytes_per_s=1e6,
    h2d_pageable_bytes_per_s=1e13,
    d2h_pageable_bytes_per_s=1e13,
    host_memory_bytes_per_s=1e14,
    cpu_update_params_per_s=1e6,
    cpu_cast_params_per_s=1e13,
    gpu_update_params_per_s=1e15,
)
# Bytes of device memory for state: at any time, or by phase.
Budget = float | Mapping[str, float]
# Rates, phases or memory that differ by more than this from those that the plan was made with ask for a new one.
_DRIFT = 0.15
# By more than this they ask for it at once.
_LEAP = 0.5
# How much of what the last step shows goes into what is planned with.
_WEIGHT = 0.5
# Steps from one plan to the next, at least.
_PATIENCE, _MOST_PATIENCE = 3, 96
# Planning, which holds the step up, takes this share of the time at most.
_PLANNING = 0.01
# Steps until phases and rates are those of a job that runs.
_WARM = 2
_RATES = {
    ("update", "cpu"): "cpu_update_params_per_s",
    ("update", "gpu"): "gpu_update_params_per_s",
    ("cast", "cpu"): "cpu_cast_params_per_s",
}


class Planner:
    """policy: as `ebbtide replay` takes it. machine: the rates to begin with. streams: whether
    gradients leave as soon as they are made. Only `adaptive` is planned anew: other
    policies know no rates."""

    def __init__(self, policy: str, machine: Machine, subgroups: Sequence[Subgroup], streams: bool) -> None:
        self.policy = policy
        self.machine = machine
        width = max((subgroup.dtype.itemsize for subgroup in subgroups), default=2)
        sizes = tuple(subgroup.params for subgroup in subgroups)
        self.workload = Workload(
            name="this job",
            params=sum(sizes),
            subgroup_params=max(sizes, default=1),
            sizes=sizes,
            forward_s=0.0,
            backward_s=0.0,
            param_bytes=width,
            grad_bytes=width,
            gradients_stay=not streams,
        )
        self._planned: tuple[Workload, Machine, Budget | None] | None = None
        self._steps = 0
        # Of device memory, by the last plan.
        self.needed_bytes = 0.0
        self._counts: dict[str, int] = {}
        self._planned_at = 0
        self._patience = _PATIENCE
        # On the clock of time.perf_counter: when the last plan was made, and how long that took.
        self._made_s = 0.0
        self._planning_s = 0.0

    def plan(self, budget: Budget | None) -> Plan:
        """A plan for what is known by now. Raises PolicyError and MachineError as `make_plan` does, and EngineError
        where it needs more memory than there is."""
        begin = time.perf_counter()
        plan, crowded = self._made(budget)
        # `adaptive` fits phases by its own rates: on links as slow as crowding has them no window would ever be used.
        limit = _most(budget) if self.policy == "adaptive" else least(budget)
        if isinstance(budget, Mapping) and _exceeds(crowded, limit):
            plan, crowded = self._made(least(budget))
        self._planned = (self.workload, self.machine, budget)
        if _exceeds(crowded, limit):
            raise EngineError(
                f"policy {self.policy} takes {bytes_text(crowded.peak_device_bytes)} of device memory, more than the "
                f"{budget} bytes it may: choose smaller subgroups, a policy that takes less, or `adaptive`"
            )
        self.needed_bytes = crowded.peak_device_bytes
        # Rates that only waver give the same plan again: then wait longer before the next look.
        counts = plan.counts()
        self._patience = min(2 * self._patience, _MOST_PATIENCE) if counts == self._counts else _PATIENCE
        self._counts, self._planned_at = counts, self._steps
        self._made_s = time.perf_counter()
        self._planning_s = self._made_s - begin
        return plan

    def _made(self, budget: Budget | None) -> tuple[Plan, Schedule]:
        """(a plan, and how it takes as much memory as it can)."""
        self.workload = replace(self.workload, gpu_free=_free_line(budget, self.workload))
        # A rank that holds empty shards alone has nothing to choose.
        policy = self.policy if self.workload.params else "zero-offload"
        plan = make_plan(policy, self.workload, self.machine)
        return plan, simulate(plan, self.workload, _CROWDING)

    def observe(self, schedule: Schedule) -> None:
        """Learn from a step: how long the phases are, and how fast the machine is."""
        self._steps += 1
        if self._steps <= _WARM:
            return
        job = schedule.workload
        first = self._steps == _WARM + 1
        self.workload = replace(
            self.workload,
            forward_s=_mixed(self.workload.forward_s, job.forward_s, first),
            backward_s=_mixed(self.workload.backward_s, job.backward_s, first),
        )
        self.machine = corrected(self.machine, schedule)

    def drifted(self, budget: Budget | None) -> str | None:
        """Why a new plan is due; None where it is not."""
        if self._planned is None or self.policy != "adaptive" or self._steps <= _WARM:
            return None
        job, machine, budgeted = self._planned
        most = _most(budget)
        if _differ(budget, budgeted) or (most is not None and most < self.needed_bytes):
            return f"device memory for state went from {budgeted} to {budget} bytes"
        if not job.compute_s:
            return "the phases of the job are known now"
        waited = self._steps - self._planned_at
        if waited < _PATIENCE or (time.perf_counter() - self._made_s) * _PLANNING < self._planning_s:
            return None
        # What only wavers waits for longer; what leaps does not.
        drift = _DRIFT if waited >= self._patience else _LEAP
        for key in ("h2d_bytes_per_s", "d2h_bytes_per_s", *_RATES.values()):
            before, now = getattr(machine, key), getattr(self.machine, key)
            if before and now and max(now / before, before / now) > 1 + drift:
                return f"{key} went from {before:.3g} to {now:.3g}"
        for key in ("forward_s", "backward_s"):
            before, now = getattr(job, key), getattr(self.workload, key)
            if abs(now - before) > drift * job.compute_s:
                return f"{key} went from {before:.3g} to {now:.3g}"
        return None


def _differ(budget: Budget | None, other: Budget | None) -> bool:
    if isinstance(budget, Mapping) or isinstance(other, Mapping) or budget is None or other is None:
        return budget != other
    return abs(budget - other) > _DRIFT * max(budget, other)


def least(budget: Budget | None) -> float | None:
    """What state may take at every moment, bytes; None for no limit."""
    return min(map(float, budget.values())) if isinstance(budget, Mapping) else budget


def _most(budget: Budget | None) -> float | None:
    """What state may take at some moment, bytes; None for no limit."""
    return max(map(float, budget.values())) if isinstance(budget, Mapping) else budget


def _exceeds(schedule: Schedule, limit: float | None) -> bool:
    return limit is not None and schedule.peak_device_bytes > limit


def corrected(machine: Machine, schedule: Schedule) -> Machine:
    """The machine whose simulation of this plan would take the time on each resource that was measured, half the way
    there: rates differ by as much as the times do, so that what runs at once and shares stays accounted for."""
    try:
        predicted = simulate(schedule.plan, schedule.workload, machine)
    except UserError:
        return machine
    taken: dict[str, float] = {}
    expected: dict[str, float] = {}
    for (op, start, end), (_, begin, stop) in zip(schedule.items(), predicted.items(), strict=True):
        key = _rate_of(op)
        if key is not None:
            taken[key] = taken.get(key, 0.0) + end - start
            expected[key] = expected.get(key, 0.0) + stop - begin
    rates = {}
    for key, seconds in taken.items():
        rate = getattr(machine, key)
        if rate and seconds > 0 and expected[key] > 0:
            rates[key] = rate * (expected[key] / seconds) ** _WEIGHT
    return replace(machine, **rates)


def _rate_of(op: Op) -> str | None:
    if op.resource in ("h2d", "d2h"):
        return f"{op.resource}_pageable_bytes_per_s" if op.pageable else f"{op.resource}_bytes_per_s"
    return _RATES.get((op.kind, op.resource))


def _mixed(old: float, new: float, first: bool) -> float:
    return new if first else old + _WEIGHT * (new - old)


def _free_line(budget: Budget | None, workload: Workload) -> FreeLine:
    if budget is None:
        # More than everything.
        budget = 2 * (workload.state_bytes + workload.grad_bytes) * workload.params
    if not isinstance(budget, Mapping):
        return ((0.0, float(budget)),)
    line: dict[float, float] = {}
    begin = 0.0
    for phase, length in (("forward", workload.forward_s), ("backward", workload.backward_s), ("update", 0.0)):
        # Of phases that take no time the last counts, unless less is free before it.
        line[begin] = min(budget[phase], line.get(begin, budget[phase]))
        begin += length
    return tuple(sorted(line.items()))
