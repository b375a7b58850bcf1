"""The simulator: runs a plan in virtual time."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from ebbtide.errors import PlanError
from ebbtide.interleave.model.durations import Durations, host_traffic, link_shares, phase_before
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine

_CPU, _GPU, _H2D, _D2H, _COMPUTE = range(5)
_INDEX = {"cpu": _CPU, "gpu": _GPU, "h2d": _H2D, "d2h": _D2H}
_INFINITE = float("inf")
_ALL_LEFT = (1.0, 1.0)


def simulate(plan: Plan, workload: Workload, machine: Machine) -> Schedule:
    """Run a plan on a machine. The same input gives the same output to the bit.

    Each resource runs the first operation of the plan that is ready, one at a time. Operations that run at the same
    time share as a fluid: both directions of the link share their duplex limit; CPU updates and copies share the
    bandwidth of host memory. All are slowed by the same factor if together they need more than there is.

    Raises:
        MachineError: The machine lacks a rate that the plan needs.
        PlanError: Operations wait for each other.
    """
    return _Simulation(plan, workload, machine).run()


class _Simulation:
    """Tasks of one iteration: the operations of the plan, then the compute between any two points of the iteration,
    then the overhead of the step."""

    def __init__(self, plan: Plan, workload: Workload, machine: Machine) -> None:
        self._plan = plan
        self._workload = workload
        self._machine = machine
        durations = Durations(plan, workload, machine)
        points = sorted({op.point for op in plan.ops} | {FORWARD, BACKWARD, UPDATE})
        self._points = [point for point in points if 0.0 < point <= UPDATE]
        count = len(plan.ops)
        compute_until = {point: count + number for number, point in enumerate(self._points)}
        overhead = count + len(self._points)
        # Per task: seconds without sharing, bytes of host memory traffic, and the resource.
        self._alone_s = [durations.seconds(op) for op in plan.ops]
        self._traffic = [host_traffic(op, workload) for op in plan.ops]
        self._resource = [_INDEX[op.resource] for op in plan.ops]
        self._alone_s += _compute_lengths(workload, self._points)
        self._alone_s.append(machine.step_overhead_s or 0.0)
        self._traffic += [0.0] * (len(self._points) + 1)
        self._resource += [_COMPUTE] * (len(self._points) + 1)
        # Per task of compute: the shares of the link that the job leaves meanwhile, to the device and to the host.
        left = link_shares(workload, machine)
        self._link_left = {
            compute_until[point]: left[phase_before(point)] for point in self._points if phase_before(point) in left
        }
        # Per task: how many tasks it still waits for, and the tasks that wait for it.
        self._pending = [len(op.after) for op in plan.ops] + [1] * (len(self._points) + 1)
        self._pending[count] = 0
        self._successors: list[list[int]] = [[] for _ in range(overhead + 1)]
        for number in range(count, overhead):
            self._successors[number].append(number + 1)
        for index, op in enumerate(plan.ops):
            for predecessor in op.after:
                self._successors[predecessor].append(index)
            gate = overhead if op.point > UPDATE else compute_until.get(op.point)
            if gate is not None:
                self._successors[gate].append(index)
                self._pending[index] += 1
            if op.blocking:
                blocked = compute_until[op.point] + 1 if op.point > 0.0 else count
                self._successors[index].append(blocked)
                self._pending[blocked] += 1

    def run(self) -> Schedule:
        starts, ends = self._times()
        count = len(self._plan.ops)
        reached = dict(zip(self._points, ends[count:], strict=False))
        # The last gradient is ready when the backward ends. If copies block, the backward also waits for its copy.
        blocking_ends = (end for op, end in zip(self._plan.ops, ends, strict=False) if op.blocking)
        update_begin = max(reached[UPDATE], max(blocking_ends, default=0.0))
        update_end = max(ends, default=0.0)
        return Schedule(
            plan=self._plan,
            workload=self._workload,
            starts=starts[:count],
            ends=ends[:count],
            other_s=reached[FORWARD],
            forward_s=reached[BACKWARD] - reached[FORWARD],
            backward_s=update_begin - reached[BACKWARD],
            update_s=update_end - update_begin,
        )

    def _times(self) -> tuple[list[float], list[float]]:
        """Return the start and the end of each task, s."""
        alone_s, traffic, resource, successors = self._alone_s, self._traffic, self._resource, self._successors
        pending = self._pending
        total = len(alone_s)
        starts, ends = [0.0] * total, [0.0] * total
        ready: list[list[int]] = [[], [], [], [], []]
        for index in range(total):
            if not pending[index]:
                ready[resource[index]].append(index)
        # Per resource: the task that runs (-1: none), and its remaining seconds without sharing.
        running = [-1] * 5
        remaining_s = [0.0] * 5
        now = 0.0
        done = 0
        sharing = _Sharing(self._machine, self._link_left)
        while done < total:
            for r in range(5):
                if running[r] < 0 and ready[r]:
                    index = heappop(ready[r])
                    running[r] = index
                    remaining_s[r] = alone_s[index]
                    starts[index] = now
            speeds = sharing.speeds(running, alone_s, traffic)
            step = _INFINITE
            for r in range(5):
                if running[r] >= 0:
                    needed = remaining_s[r] / speeds[r]
                    if needed < step:
                        step = needed
            if step == _INFINITE:
                raise PlanError(f"policy {self._plan.policy}: nothing can run, and {total - done} operations wait")
            now += step
            for r in range(5):
                index = running[r]
                if index < 0:
                    continue
                still_s = remaining_s[r] - step * speeds[r]
                if still_s > 1e-12 * alone_s[index]:
                    remaining_s[r] = still_s
                    continue
                running[r] = -1
                ends[index] = now
                done += 1
                for successor in successors[index]:
                    pending[successor] -= 1
                    if not pending[successor]:
                        heappush(ready[resource[successor]], successor)
        return starts, ends


class _Sharing:
    """Speeds of tasks that run at the same time, as shares of their speed alone."""

    def __init__(self, machine: Machine, link_left: dict[int, tuple[float, float]]) -> None:
        self._link_left = link_left
        self._duplex = machine.duplex_bytes_per_s
        self._host_memory = machine.host_memory_bytes_per_s or _INFINITE

    def speeds(self, running: list[int], alone_s: list[float], traffic: list[float]) -> list[float]:
        cpu, up, down = running[_CPU], running[_H2D], running[_D2H]
        cpu_demand = traffic[cpu] / alone_s[cpu] if cpu >= 0 and alone_s[cpu] > 0.0 else 0.0
        up_demand = traffic[up] / alone_s[up] if up >= 0 and alone_s[up] > 0.0 else 0.0
        down_demand = traffic[down] / alone_s[down] if down >= 0 and alone_s[down] > 0.0 else 0.0
        up_left, down_left = self._link_left.get(running[_COMPUTE], _ALL_LEFT) if self._link_left else _ALL_LEFT
        up_demand, down_demand = up_demand * up_left, down_demand * down_left
        link = 1.0
        if self._duplex is not None and up_demand + down_demand > self._duplex:
            link = self._duplex / (up_demand + down_demand)
        demand = cpu_demand + link * (up_demand + down_demand)
        share = self._host_memory / demand if demand > self._host_memory else 1.0
        return [share, 1.0, share * link * up_left, share * link * down_left, 1.0]


def _compute_lengths(workload: Workload, points: list[float]) -> list[float]:
    """Return the seconds of compute until each point of the iteration from the point before it."""
    lengths = (workload.other_s, workload.forward_s, workload.backward_s)
    point_array = np.array(points)
    until = sum(length * np.clip(point_array - phase, 0.0, 1.0) for phase, length in enumerate(lengths))
    from_previous: list[float] = np.diff(until, prepend=0.0).tolist()
    return from_previous
