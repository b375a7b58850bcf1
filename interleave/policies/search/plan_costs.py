"""The costs of plans, by simulating them, as far as a limited amount of simulation allows."""

from __future__ import annotations

from typing import NamedTuple

from ebbtide.interleave.model.host_memory import available_host_bytes
from ebbtide.interleave.model.overlap import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.speculation import redone
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.search.assignment import Assignment
from ebbtide.interleave.policies.search.assignment_plan import plan_of
from ebbtide.interleave.policies.search.capacity import FreeMemory
from ebbtide.interleave.policies.search.minimum_costs import INFINITE, MinimumCosts
from ebbtide.interleave.policies.storage import with_default_storage
from ebbtide.interleave.simulation.simulator import Simulator
from ebbtide.machines.machine import Machine

# Factor of the cost of plans that do not fit into host memory: if none fits, the fastest is still the one to show.
_HOST_MEMORY_PENALTY = 1e3
# Weights in the cost: of the times by which operations end after the backward, summed and divided by the number of
# subgroups, and of copy time. Of plans that take equally long, one is better whose work is done earlier, since the next
# change may then shorten it, and one that moves less.
_LATE_WEIGHT = 1e-3
_MOVED_WEIGHT = 1e-6
# Weight of the share of the CPU that is not used, as a share of the iteration: fewer threads must gain something.
_THROTTLE_WEIGHT = 5e-3
# A simulated plan costs as much as so many operations in addition to its own; a plan that is not simulated, so many.
_OPS_PER_PLAN = 10
_OPS_PER_LOOKUP = 5


class PlanCosts:
    """Simulates plans of one workload on one machine, and remembers their costs.

    The cost of a plan is about the seconds of its iteration; infinite if it exceeds the free device memory.

    Attributes:
        workload: The workload.
        machine: The machine. All its rates that plans need must be known, that of updates on the GPU excepted.
        text: The policy's string in the plans made here.
        overlap: Phases that updates may run in.
        memory: Its free memory.
        cpu_slows_copies: Whether updates on the CPU and copies together need more than host memory gives.
        ops_left: Work that the search may still do, in simulated operations.
    """

    def __init__(
        self, workload: Workload, machine: Machine, text: str, max_ops: int, overlap: Overlap = NO_OVERLAP
    ) -> None:
        self.workload = workload
        self.machine = machine
        self.text = text
        self.overlap = overlap
        self.ops_left = max_ops
        self.memory = FreeMemory(workload)
        self._simulator = Simulator(workload, machine)
        self._link_bytes_per_s = (machine.h2d_bytes_per_s or 1.0) + (machine.d2h_bytes_per_s or 1.0)
        self._minimums = MinimumCosts(workload, machine, self.memory, overlap)
        self.cpu_slows_copies = self._minimums.cpu_slows_copies
        self._evaluations: dict[Assignment, _Evaluation] = {}
        # The plan made last: with many subgroups it takes long to make it again.
        self._latest: tuple[Assignment, Plan] | None = None

    def plan(self, assignment: Assignment, validate: bool = True) -> Plan:
        """Make the plan of an assignment."""
        if self._latest is None or self._latest[0] is not assignment:
            self._latest = assignment, self._plan_of(assignment)
        plan = self._latest[1]
        return plan.validate(self.workload) if validate else plan

    def _plan_of(self, assignment: Assignment) -> Plan:
        return plan_of(self.workload, self.memory, assignment, self.text, validate=False, overlap=self.overlap)

    def cost(self, assignment: Assignment, limit: float = INFINITE) -> float:
        """Return the cost of an assignment: its seconds, and a little for late operations and for bytes that it moves.

        Args:
            assignment: The assignment.
            limit: Where the cost is at least this, any number from the limit to the cost is returned.
        """
        self.ops_left -= _OPS_PER_LOOKUP
        evaluation = self._evaluations.get(assignment)
        if evaluation is None:
            least_s = self.min_cost(assignment)
            evaluation = _Evaluation(least_s, least_s, least_s == INFINITE)
        if not evaluation.exact and evaluation.cost < limit:
            evaluation = self._simulated(self.plan(assignment, validate=False), limit)
        self._evaluations[assignment] = evaluation
        return evaluation.cost

    def seconds(self, assignment: Assignment) -> float:
        """Return the seconds of the iteration under an assignment; infinite if it exceeds the free device memory."""
        self.cost(assignment)
        return self._evaluations[assignment].seconds

    def seconds_of_plan(self, plan: Plan, limit: float = INFINITE) -> float:
        """Return the seconds of the iteration under a plan; see `cost` for the limit."""
        return self._simulated(plan, limit).seconds

    def min_cost(self, assignment: Assignment) -> float:
        """Return a lower bound of the cost of an assignment (see `MinimumCosts`)."""
        return self._minimums.of_assignment(assignment)

    def min_cost_of_plan(self, plan: Plan) -> float:
        """Return a lower bound of the cost of any plan (see `MinimumCosts`)."""
        return self._minimums.of_plan(plan)

    def _simulated(self, plan: Plan, limit: float) -> _Evaluation:
        plan = with_default_storage(plan, self.workload, self.machine)
        self.ops_left -= len(plan.ops) + _OPS_PER_PLAN
        schedule = self._simulator.run(plan, limit, steady=False)
        if schedule is None:
            return _Evaluation(limit, limit, exact=False)
        seconds = schedule.iteration_s
        begin_s = seconds - schedule.update_s
        share = self.workload.clip_active_share
        if plan.speculated and share:
            self.ops_left -= len(plan.ops) + _OPS_PER_PLAN
            again = redone(plan)
            redone_limit = (limit - (1 - share) * seconds) / share
            redone_schedule = self._simulator.run(again, redone_limit, steady=False)
            if redone_schedule is None:
                return _Evaluation(limit, limit, exact=False)
            seconds = (1 - share) * seconds + share * redone_schedule.iteration_s
        late_s = sum([end - begin_s for end in schedule.ends if end > begin_s]) / plan.subgroups
        moved_s = sum([op.nbytes for op in plan.ops]) / self._link_bytes_per_s
        factor = 1.0
        host_bytes = available_host_bytes(self.workload, self.machine)
        if host_bytes is not None and schedule.host_bytes() > host_bytes:
            factor = _HOST_MEMORY_PENALTY
        throttle_s = _THROTTLE_WEIGHT * (1 - plan.cpu_share) * seconds
        cost = factor * (seconds + _LATE_WEIGHT * late_s + _MOVED_WEIGHT * moved_s + throttle_s)
        seconds *= factor
        if seconds >= limit:
            return _Evaluation(seconds, cost, exact=False)
        return _Evaluation(seconds, cost, exact=True) if schedule.fits_device(None) else _DOES_NOT_FIT


class _Evaluation(NamedTuple):
    """Measures of a plan.

    Attributes:
        seconds: Seconds of its iteration.
        cost: The same, with a little for late operations and for bytes that it moves.
        exact: Whether both are exact; otherwise they are lower bounds.
    """

    seconds: float
    cost: float
    exact: bool


_DOES_NOT_FIT = _Evaluation(INFINITE, INFINITE, exact=True)
