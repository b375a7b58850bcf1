"""The simulator: a plan in virtual time."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from ebbtide.errors import PlanError
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, Kind, Op, Plan, Resource
from ebbtide.interleave.model.schedule import Schedule, host_traffic
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine

_CPU, _GPU, _H2D, _D2H, _COMPUTE = range(5)
_INDEX = {"cpu": _CPU, "gpu": _GPU, "h2d": _H2D, "d2h": _D2H}
_NEVER = float("inf")


def simulate(plan: Plan, workload: Workload, machine: Machine) -> Schedule:
    """Run a plan on a machine. The same input gives the same output to the bit.

    Each resource takes the first operation of the plan that is ready, one at a time. What runs at once shares: both
    directions of the link their duplex limit, CPU updates and copies the host's memory bandwidth, each slowed by the
    same factor where together they ask for more than there is (fluid sharing). Raises MachineError where a rate that
    the plan needs is not known.
    """
    return _Run(plan, workload, machine).run()


class _Run:
    def __init__(self, plan: Plan, workload: Workload, machine: Machine) -> None:
        self._plan = plan
        self._workload = workload
        self._machine = machine
        costs = _Costs(plan, workload, machine)
        points = sorted({op.point for op in plan.ops} | {FORWARD, BACKWARD, UPDATE})
        self._points = [point for point in points if 0.0 < point <= UPDATE]
        count = len(plan.ops)
        # Operations of the plan, then the stretches of compute that lie between points, then the step's own overhead.
        stretch = {point: count + number for number, point in enumerate(self._points)}
        overhead = count + len(self._points)
        # Alone, seconds; and bytes of host memory that are read and written meanwhile.
        self._alone = [costs.seconds(op) for op in plan.ops]
        self._traffic = [host_traffic(op, workload) for op in plan.ops]
        self._resource = [_INDEX[op.resource] for op in plan.ops]
        self._alone += _stretches(workload, self._points)
        self._alone.append(machine.step_overhead_s or 0.0)
        self._traffic += [0.0] * (len(self._points) + 1)
        self._resource += [_COMPUTE] * (len(self._points) + 1)
        self._waits = [len(op.after) for op in plan.ops] + [1] * (len(self._points) + 1)
        self._waits[count] = 0
        self._next: list[list[int]] = [[] for _ in range(overhead + 1)]
        for number in range(count, overhead):
            self._next[number].append(number + 1)
        for index, op in enumerate(plan.ops):
            for early in op.after:
                self._next[early].append(index)
            gate = overhead if op.point > UPDATE else stretch.get(op.point)
            if gate is not None:
                self._next[gate].append(index)
                self._waits[index] += 1
            if op.blocking:
                after = stretch[op.point] + 1 if op.point > 0.0 else count
                self._next[index].append(after)
                self._waits[after] += 1

    def run(self) -> Schedule:
        starts, ends = self._times()
        count = len(self._plan.ops)
        reached = dict(zip(self._points, ends[count:], strict=False))
        # The last gradient is made as the backward ends, which waits for it where copies block.
        waited = (end for op, end in zip(self._plan.ops, ends, strict=False) if op.blocking)
        begin = max(reached[UPDATE], max(waited, default=0.0))
        end = max(ends, default=0.0)
        return Schedule(
            plan=self._plan,
            workload=self._workload,
            starts=starts[:count],
            ends=ends[:count],
            other_s=reached[FORWARD],
            forward_s=reached[BACKWARD] - reached[FORWARD],
            backward_s=begin - reached[BACKWARD],
            update_s=end - begin,
        )

    def _times(self) -> tuple[list[float], list[float]]:
        """When each operation begins and ends, s."""
        alone, traffic, resource, following = self._alone, self._traffic, self._resource, self._next
        waits = self._waits
        total = len(alone)
        starts, ends = [0.0] * total, [0.0] * total
        ready: list[list[int]] = [[], [], [], [], []]
        for index in range(total):
            if not waits[index]:
                ready[resource[index]].append(index)
        running = [-1] * 5
        left = [0.0] * 5
        now = 0.0
        done = 0
        sharing = _Sharing(self._machine, self._workload)
        while done < total:
            for r in range(5):
                if running[r] < 0 and ready[r]:
                    index = heappop(ready[r])
                    running[r] = index
                    left[r] = alone[index]
                    starts[index] = now
            speeds = sharing.speeds(running, alone, traffic)
            step = _NEVER
            for r in range(5):
                if running[r] >= 0:
                    needed = left[r] / speeds[r]
                    if needed < step:
                        step = needed
            if step == _NEVER:
                raise PlanError(f"policy {self._plan.policy}: nothing can run, and {total - done} operations wait")
            now += step
            for r in range(5):
                index = running[r]
                if index < 0:
                    continue
                rest = left[r] - step * speeds[r]
                if rest > 1e-12 * alone[index]:
                    left[r] = rest
                    continue
                running[r] = -1
                ends[index] = now
                done += 1
                for after in following[index]:
                    waits[after] -= 1
                    if not waits[after]:
                        heappush(ready[resource[after]], after)
        return starts, ends


class _Sharing:
    """How fast what runs at once goes, as a share of its speed alone."""

    def __init__(self, machine: Machine, workload: Workload) -> None:
        self._duplex = machine.duplex_bytes_per_s
        self._host = machine.host_memory_bytes_per_s or _NEVER

    def speeds(self, running: list[int], alone: list[float], traffic: list[float]) -> list[float]:
        cpu, up, down = running[_CPU], running[_H2D], running[_D2H]
        of_cpu = traffic[cpu] / alone[cpu] if cpu >= 0 and alone[cpu] > 0.0 else 0.0
        of_up = traffic[up] / alone[up] if up >= 0 and alone[up] > 0.0 else 0.0
        of_down = traffic[down] / alone[down] if down >= 0 and alone[down] > 0.0 else 0.0
        link = 1.0
        if self._duplex is not None and of_up + of_down > self._duplex:
            link = self._duplex / (of_up + of_down)
        asked = of_cpu + link * (of_up + of_down)
        share = self._host / asked if asked > self._host else 1.0
        return [share, 1.0, share * link, share * link, 1.0]


class _Costs:
    """What an operation takes when nothing else runs."""

    def __init__(self, plan: Plan, workload: Workload, machine: Machine) -> None:
        need = {"host_memory_bytes_per_s"}
        for of in {(op.kind, op.resource, op.pageable) for op in plan.ops}:
            need |= _needs(*of)
        machine.need(sorted(need), f"policy {plan.policy}")
        rates = {
            "h2d": (machine.h2d_bytes_per_s or 1.0) * (1 - workload.h2d_busy_share),
            "d2h": (machine.d2h_bytes_per_s or 1.0) * (1 - workload.d2h_busy_share),
        }
        pageable = {
            "h2d": machine.h2d_pageable_bytes_per_s or 1.0,
            "d2h": machine.d2h_pageable_bytes_per_s or 1.0,
        }
        # A job that uses the link leaves less of it to pageable copies too.
        self._rates = {False: rates, True: {way: min(pageable[way], rates[way]) for way in rates}}
        self._update = {"cpu": machine.cpu_update_params_per_s or 1.0, "gpu": machine.gpu_update_params_per_s or 1.0}
        self._cast = machine.cpu_cast_params_per_s or 1.0

    def seconds(self, op: Op) -> float:
        if op.kind == "update":
            return op.params / self._update[op.resource]
        if op.kind == "cast":
            return op.params / self._cast
        if op.kind == "clip":
            return 0.0
        return op.nbytes / self._rates[op.pageable][op.resource]


def _needs(kind: Kind, resource: Resource, pageable: bool) -> set[str]:
    if kind == "clip":
        return set()
    if kind == "update":
        return {f"{resource}_update_params_per_s"}
    if kind == "cast":
        return {"cpu_cast_params_per_s"}
    return {f"{resource}_bytes_per_s", *([f"{resource}_pageable_bytes_per_s"] if pageable else [])}


def _stretches(workload: Workload, points: list[float]) -> list[float]:
    """Seconds of compute until each point of the iteration from the one before it."""
    lengths = (workload.other_s, workload.forward_s, workload.backward_s)
    at = np.array(points)
    until = sum(length * np.clip(at - phase, 0.0, 1.0) for phase, length in enumerate(lengths))
    stretches: list[float] = np.diff(until, prepend=0.0).tolist()
    return stretches
