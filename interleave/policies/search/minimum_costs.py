"""Lower bounds of the costs of plans, from the work of each resource alone."""

from __future__ import annotations

from ebbtide.interleave.model.durations import Durations, host_traffic, norm_s
from ebbtide.interleave.model.overlap import Overlap
from ebbtide.interleave.model.plan import BACKWARD, STEP, UPDATE, Plan, gradient_ready_points
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.search.assignment import Assignment
from ebbtide.interleave.policies.search.capacity import FreeMemory
from ebbtide.machines.machine import Machine

INFINITE = float("inf")


class MinimumCosts:
    """Lower bounds of the seconds of an iteration, for one workload on one machine.

    Late operations have the time from the backward to the next one, so that is at least as long as their work. An
    iteration is also at least as long as its compute and what the next one waits for.

    Attributes:
        cpu_slows_copies: Whether updates on the CPU and copies together need more than host memory gives.
    """

    def __init__(self, workload: Workload, machine: Machine, memory: FreeMemory, overlap: Overlap) -> None:
        self._workload = workload
        self._machine = machine
        self._memory = memory
        self._overlap = overlap
        # Seconds per byte, and per parameter, of each resource alone.
        self._h2d_s = 1 / ((machine.h2d_bytes_per_s or 1.0) * (1 - workload.h2d_busy_share))
        self._d2h_s = 1 / ((machine.d2h_bytes_per_s or 1.0) * (1 - workload.d2h_busy_share))
        self._host_s = 1 / (machine.host_memory_bytes_per_s or INFINITE)
        self._cpu_s = 1 / (machine.cpu_update_rate(workload.master) or INFINITE)
        self._gpu_s = 1 / (machine.gpu_update_params_per_s or INFINITE)
        link_bytes_per_s = min(1 / self._h2d_s + 1 / self._d2h_s, machine.duplex_bytes_per_s or INFINITE)
        self.cpu_slows_copies = machine.gpu_update_params_per_s is not None and (
            workload.cpu_update_bytes / self._cpu_s + link_bytes_per_s > 1 / self._host_s
        )
        self._flush_s = workload.state_bytes * self._d2h_s
        begin_s = workload.compute_s - workload.backward_s
        ready_s = [begin_s + workload.backward_s * (p - BACKWARD) for p in gradient_ready_points(workload)]
        # When each subgroup is done if it alone follows its gradient: on the CPU, resident, flushed.
        on_cpu_s = workload.grad_bytes * self._d2h_s + self._cpu_s + workload.param_bytes * self._h2d_s
        self._least_ends_s = [
            [ready + rate * size for ready, size in zip(ready_s, workload.subgroups, strict=True)]
            for rate in (on_cpu_s, self._gpu_s, self._gpu_s + self._flush_s)
        ]
        self._overhead_s = machine.step_overhead_s or 0.0
        self._prefix_s = self._overhead_s + norm_s(workload, machine)
        # From the beginning of the backward until the first update may begin without clipping.
        last_size = workload.subgroups[-1] if workload.subgroups else 0
        self._first_gradient_s = workload.backward_s * last_size / max(workload.params, 1)

    def of_assignment(self, assignment: Assignment) -> float:
        """Return a lower bound of the cost of an assignment; infinite if its state does not fit."""
        workload, machine = self._workload, self._machine
        size = workload.subgroups.__getitem__
        on_cpu = sum(map(size, assignment.on_cpu))
        on_gpu = workload.params - on_cpu
        if (on_gpu and machine.gpu_update_params_per_s is None) or not self._memory.holds(assignment):
            return INFINITE
        moved = sum(map(size, assignment.moved))
        down_s = (moved - sum(map(size, assignment.late))) * self._flush_s
        cpu_s, gpu_s = on_cpu * self._cpu_s / assignment.cpu_share, on_gpu * self._gpu_s
        if self._overlap.backward and assignment.speculated and workload.clipping:
            # Of steps in which nothing is computed again; the CPU may work from the first gradient on.
            within_s = self._first_gradient_s + max(cpu_s, self._host_s * workload.cpu_update_bytes * on_cpu)
            return max(workload.compute_s + self._prefix_s + gpu_s, within_s)
        if not workload.needs_all_gradients:
            if self._overlap.forward:
                within_s = self._first_gradient_s + max(cpu_s, gpu_s, down_s)
                return max(workload.compute_s + self._overhead_s, within_s)
            # Updates begin with the first gradient.
            first_s = workload.compute_s - workload.backward_s + self._first_gradient_s
            return max(first_s + max(cpu_s, gpu_s, down_s), self._last_end_s(assignment))
        fetched = moved - sum(map(size, assignment.early))
        up = workload.state_bytes * fetched + workload.param_bytes * on_cpu
        down = workload.state_bytes * down_s / self._flush_s
        traffic = workload.cpu_update_bytes * on_cpu + up + down
        copies_s = max(up * self._h2d_s, traffic * self._host_s)
        if machine.duplex_bytes_per_s is not None:
            copies_s = max(copies_s, (up + down) / machine.duplex_bytes_per_s)
        if self._overlap.forward:
            # Compute stands still during updates on the GPU.
            within_s = workload.backward_s + max(self._prefix_s + max(cpu_s, down_s), copies_s)
            return max(workload.compute_s + self._prefix_s + gpu_s, within_s)
        return workload.compute_s + max(self._prefix_s + max(cpu_s, gpu_s, down_s), copies_s)

    def _last_end_s(self, assignment: Assignment) -> float:
        """Return a lower bound of when the last subgroup is done, each alone after its gradient."""
        on_cpu, resident, flushed = (ends.__getitem__ for ends in self._least_ends_s)
        return max(
            *map(on_cpu, assignment.on_cpu),
            *map(resident, assignment.resident),
            *(resident(s) if s in assignment.late else flushed(s) for s in assignment.moved),
            0.0,
        )

    def of_plan(self, plan: Plan) -> float:
        """Return a lower bound of the cost of any plan, from the work of each resource since the update began.

        Storage is left out.
        """
        workload = self._workload
        if plan.speculated:
            return workload.compute_s + self._overhead_s
        durations = Durations(plan, workload, self._machine)
        # Of operations that end with the step, and of all.
        on_time_s, busy_s = (dict.fromkeys(("cpu", "gpu", "h2d", "d2h"), 0.0) for _ in range(2))
        on_time_traffic = traffic = gpu_after_step_s = 0.0
        for op in plan.ops:
            if op.point < UPDATE or op.resource not in busy_s:
                continue
            seconds, nbytes = durations.seconds(op), host_traffic(op, workload)
            busy_s[op.resource] += seconds
            traffic += nbytes
            if op.due is None:
                on_time_s[op.resource] += seconds
                on_time_traffic += nbytes
            if op.resource == "gpu" and op.point >= STEP:
                gpu_after_step_s += seconds
        after_step = plan.has_late_operations or any(op.point >= STEP for op in plan.ops)
        overhead_s = self._overhead_s if after_step else 0.0
        step_s = max(*on_time_s.values(), on_time_traffic * self._host_s, overhead_s)
        if not plan.has_late_operations:
            return workload.compute_s + step_s
        within_s = workload.backward_s + max(*busy_s.values(), traffic * self._host_s)
        return max(workload.compute_s + max(step_s, overhead_s + gpu_after_step_s), within_s)
