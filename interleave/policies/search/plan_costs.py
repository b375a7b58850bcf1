"""The costs of plans, and their lower bounds.

Plans are simulated as far as a limited amount of simulation allows.
"""

from __future__ import annotations

from typing import NamedTuple

from ebbtide.interleave.model.durations import (
    Durations,
    host_traffic,
    link_rates,
    norm_s,
)
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import (
    BACKWARD,
    STEP,
    UPDATE,
    Plan,
    gradient_ready_points,
)
from ebbtide.interleave.model.schedule import exceeds_host
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import complete
from ebbtide.interleave.policies.search.assignment import Assignment, FreeMemory
from ebbtide.interleave.policies.search.assignment_plan import plan_of
from ebbtide.interleave.simulation.simulator import Simulator, plan_of_clipped_step
from ebbtide.machines.machine import Machine

INFINITE = float("inf")


class MinimumCosts:
    """Lower bounds of the seconds of an iteration, for one workload on one machine.

    Late operations have the time from the backward to the next one, so that is at least
    as long as their work. An iteration is also at least as long as its compute and what
    the next one waits for.

    Attributes:
        cpu_slows_copies: Whether updates on the CPU and copies together need more than
            host memory gives.
    """

    def __init__(
        self, workload: Workload, machine: Machine, memory: FreeMemory, overlap: Overlap
    ) -> None:
        self._workload = workload
        self._machine = machine
        self._memory = memory
        self._overlap = overlap
        # Seconds per byte, and per parameter, of each resource alone.
        self._h2d_s, self._d2h_s = (
            1 / rate for rate in link_rates(workload, machine).values()
        )
        self._host_s = 1 / (machine.host_memory_bytes_per_s or INFINITE)
        self._cpu_s = 1 / (machine.cpu_update_rate(workload.master) or INFINITE)
        self._gpu_s = 1 / (machine.gpu_update_params_per_s or INFINITE)
        link_bytes_per_s = min(
            1 / self._h2d_s + 1 / self._d2h_s, machine.duplex_bytes_per_s or INFINITE
        )
        self.cpu_slows_copies = machine.gpu_update_params_per_s is not None and (
            workload.cpu_update_bytes / self._cpu_s + link_bytes_per_s
            > 1 / self._host_s
        )
        self._flush_s = workload.state_bytes * self._d2h_s
        begin_s = workload.compute_s - workload.backward_s
        ready_s = [
            begin_s + workload.backward_s * (p - BACKWARD)
            for p in gradient_ready_points(workload)
        ]
        # When each subgroup is done if it alone follows its gradient: on the CPU,
        # resident, flushed.
        on_cpu_s = (
            workload.grad_bytes * self._d2h_s
            + self._cpu_s
            + workload.param_bytes * self._h2d_s
        )
        self._least_ends_s = [
            [
                ready + rate * size
                for ready, size in zip(ready_s, workload.subgroups, strict=True)
            ]
            for rate in (on_cpu_s, self._gpu_s, self._gpu_s + self._flush_s)
        ]
        self._overhead_s = machine.step_overhead_s or 0.0
        self._prefix_s = self._overhead_s + norm_s(workload, machine)
        # From the beginning of the backward until the first update may begin without
        # clipping.
        last_size = workload.subgroups[-1] if workload.subgroups else 0
        self._first_gradient_s = (
            workload.backward_s * last_size / max(workload.params, 1)
        )

    def of_assignment(self, assignment: Assignment) -> float:
        """Return a lower bound of the cost of an assignment, infinite if its state does
        not fit."""
        workload, machine = self._workload, self._machine
        size = workload.subgroups.__getitem__
        on_cpu = sum(map(size, assignment.on_cpu))
        on_gpu = workload.params - on_cpu
        if (
            on_gpu and machine.gpu_update_params_per_s is None
        ) or not self._memory.holds(assignment):
            return INFINITE
        moved = sum(map(size, assignment.moved))
        down_s = (moved - sum(map(size, assignment.late))) * self._flush_s
        cpu_s, gpu_s = on_cpu * self._cpu_s / assignment.cpu_share, on_gpu * self._gpu_s
        if self._overlap.backward and assignment.speculated and workload.clipping:
            # Of steps in which nothing is computed again; the CPU may work from the
            # first gradient on.
            within_s = self._first_gradient_s + max(
                cpu_s, self._host_s * workload.cpu_update_bytes * on_cpu
            )
            return max(workload.compute_s + self._prefix_s + gpu_s, within_s)
        if not workload.needs_all_gradients:
            if self._overlap.forward:
                within_s = self._first_gradient_s + max(cpu_s, gpu_s, down_s)
                return max(workload.compute_s + self._overhead_s, within_s)
            # Updates begin with the first gradient.
            first_s = workload.compute_s - workload.backward_s + self._first_gradient_s
            return max(
                first_s + max(cpu_s, gpu_s, down_s), self._last_end_s(assignment)
            )
        fetched = moved - sum(map(size, assignment.early))
        up = workload.state_bytes * fetched + workload.param_bytes * on_cpu
        down = workload.state_bytes * down_s / self._flush_s
        traffic = workload.cpu_update_bytes * on_cpu + up + down
        copies_s = max(up * self._h2d_s, traffic * self._host_s)
        if machine.duplex_bytes_per_s is not None:
            copies_s = max(copies_s, (up + down) / machine.duplex_bytes_per_s)
        if self._overlap.forward:
            # Compute stands still during updates on the GPU.
            within_s = workload.backward_s + max(
                self._prefix_s + max(cpu_s, down_s), copies_s
            )
            return max(workload.compute_s + self._prefix_s + gpu_s, within_s)
        return workload.compute_s + max(
            self._prefix_s + max(cpu_s, gpu_s, down_s), copies_s
        )

    def _last_end_s(self, assignment: Assignment) -> float:
        """Return a lower bound of when the last subgroup is done.

        Each is done alone after its gradient.
        """
        on_cpu, resident, flushed = (ends.__getitem__ for ends in self._least_ends_s)
        return max(
            *map(on_cpu, assignment.on_cpu),
            *map(resident, assignment.resident),
            *(
                resident(s) if s in assignment.late else flushed(s)
                for s in assignment.moved
            ),
            0.0,
        )

    def of_plan(self, plan: Plan) -> float:
        """Return a lower bound of the cost of any plan, from the work of each resource
        since the update began.

        Storage is left out.
        """
        workload = self._workload
        if plan.speculated:
            return workload.compute_s + self._overhead_s
        durations = Durations(plan, workload, self._machine)
        # Of operations that end with the step, and of all.
        on_time_s, busy_s = (
            dict.fromkeys(("cpu", "gpu", "h2d", "d2h"), 0.0) for _ in range(2)
        )
        on_time_traffic = traffic = gpu_after_step_s = 0.0
        for op in plan.ops:
            if op.start < UPDATE or op.resource not in busy_s:
                continue
            seconds, nbytes = durations.seconds(op), host_traffic(op, workload)
            busy_s[op.resource] += seconds
            traffic += nbytes
            if not op.is_late:
                on_time_s[op.resource] += seconds
                on_time_traffic += nbytes
            if op.resource == "gpu" and op.start >= STEP:
                gpu_after_step_s += seconds
        after_step = plan.has_late_operations or any(
            op.start >= STEP for op in plan.ops
        )
        overhead_s = self._overhead_s if after_step else 0.0
        step_s = max(*on_time_s.values(), on_time_traffic * self._host_s, overhead_s)
        if not plan.has_late_operations:
            return workload.compute_s + step_s
        within_s = workload.backward_s + max(*busy_s.values(), traffic * self._host_s)
        return max(
            workload.compute_s + max(step_s, overhead_s + gpu_after_step_s), within_s
        )


# Factor of the cost of plans that do not fit into host memory: if none fits, the
# fastest is still the one to show.
_HOST_MEMORY_PENALTY = 1e3
# Weights in the cost: of the times by which operations end after the backward, summed
# and divided by the number of subgroups, and of copy time. Of plans that take equally
# long, one is better whose work is done earlier, since the next change may then shorten
# it, and one that moves less.
_LATE_WEIGHT = 1e-3
_MOVED_WEIGHT = 1e-6
# Weight of the share of the CPU that is not used, as a share of the iteration: fewer
# threads must gain something.
_THROTTLE_WEIGHT = 5e-3
# A simulated plan costs as much as this many operations in addition to its own; a plan
# that is not simulated, this many.
_OPS_PER_PLAN = 10
_OPS_PER_LOOKUP = 5


class PlanCosts:
    """Simulates plans of one workload on one machine, and remembers their costs.

    The cost of a plan is about the seconds of its iteration; infinite if it exceeds the
    free device memory.

    Attributes:
        machine: The machine. All its rates that plans need must be known, except the
            rate of updates on the GPU.
        text: The policy's string in the plans made here.
        minimums: Lower bounds of the costs.
        cpu_slows_copies: Whether updates on the CPU and copies together need more than
            host memory gives.
        ops_left: Work that the search may still do, in simulated operations.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        text: str,
        max_ops: int,
        overlap: Overlap = NO_OVERLAP,
    ) -> None:
        self.workload = workload
        self.machine = machine
        self.text = text
        self.overlap = overlap
        self.ops_left = max_ops
        self.memory = FreeMemory(workload)
        self._simulator = Simulator(workload, machine)
        self._link_bytes_per_s = (machine.h2d_bytes_per_s or 1.0) + (
            machine.d2h_bytes_per_s or 1.0
        )
        self.minimums = MinimumCosts(workload, machine, self.memory, overlap)
        self.cpu_slows_copies = self.minimums.cpu_slows_copies
        self._evaluations: dict[Assignment, _Evaluation] = {}
        # The plan made last: with many subgroups it takes long to make it again.
        self._latest: tuple[Assignment, Plan] | None = None

    def plan(self, assignment: Assignment, validate: bool = True) -> Plan:
        """Make the plan of an assignment."""
        if self._latest is None or self._latest[0] is not assignment:
            plan = plan_of(
                self.workload, self.memory, assignment, self.text, self.overlap
            )
            self._latest = assignment, plan
        plan = self._latest[1]
        return plan.validate(self.workload) if validate else plan

    def cost(self, assignment: Assignment, limit: float = INFINITE) -> float:
        """Return the cost of an assignment: its seconds, and a little for late
        operations and for bytes that it moves.

        Where the cost is at least the limit, any number from the limit to the cost is
        returned.
        """
        self.ops_left -= _OPS_PER_LOOKUP
        evaluation = self._evaluations.get(assignment)
        if evaluation is None:
            least_s = self.minimums.of_assignment(assignment)
            evaluation = _Evaluation(least_s, least_s, least_s == INFINITE)
        if not evaluation.exact and evaluation.cost < limit:
            evaluation = self._simulated(self.plan(assignment, validate=False), limit)
        self._evaluations[assignment] = evaluation
        return evaluation.cost

    def seconds(self, assignment: Assignment) -> float:
        """Return the seconds of the iteration under an assignment, infinite if it
        exceeds the free device memory."""
        self.cost(assignment)
        return self._evaluations[assignment].seconds

    def seconds_of_plan(self, plan: Plan, limit: float = INFINITE) -> float:
        """Return the seconds of the iteration under a plan; `cost` has the limit."""
        return self._simulated(plan, limit).seconds

    def _simulated(self, plan: Plan, limit: float) -> _Evaluation:
        plan = complete(plan, self.workload, self.machine)
        self.ops_left -= len(plan.ops) + _OPS_PER_PLAN
        schedule = self._simulator.run(plan, limit)
        if schedule is None:
            return _Evaluation(limit, limit, exact=False)
        seconds = schedule.rating_s
        begin_s = schedule.iteration_s - schedule.update_s
        share = self.workload.clip_active_share
        if plan.speculated and share:
            self.ops_left -= len(plan.ops) + _OPS_PER_PLAN
            again = plan_of_clipped_step(plan)
            redone_limit = (limit - (1 - share) * seconds) / share
            redone_schedule = self._simulator.run(again, redone_limit)
            if redone_schedule is None:
                return _Evaluation(limit, limit, exact=False)
            seconds = (1 - share) * seconds + share * redone_schedule.rating_s
        late_s = (
            sum([end - begin_s for end in schedule.ends if end > begin_s])
            / plan.subgroups
        )
        moved_s = sum([op.nbytes for op in plan.ops]) / self._link_bytes_per_s
        factor = 1.0
        if exceeds_host(plan, self.workload, self.machine):
            factor = _HOST_MEMORY_PENALTY
        throttle_s = _THROTTLE_WEIGHT * (1 - plan.cpu_share) * seconds
        cost = factor * (
            seconds + _LATE_WEIGHT * late_s + _MOVED_WEIGHT * moved_s + throttle_s
        )
        seconds *= factor
        if seconds >= limit:
            return _Evaluation(seconds, cost, exact=False)
        return (
            _Evaluation(seconds, cost, exact=True)
            if schedule.fits_device(None)
            else _DOES_NOT_FIT
        )


class _Evaluation(NamedTuple):
    """Measures of a plan."""

    seconds: float
    # The same, with a little for late operations and for bytes that it moves.
    cost: float
    exact: bool  # Whether both are exact; otherwise they are lower bounds.


_DOES_NOT_FIT = _Evaluation(INFINITE, INFINITE, exact=True)
