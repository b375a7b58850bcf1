"""An independent implementation of sharing: the speeds of operations that run at the same time."""

from __future__ import annotations

from ebbtide.interleave.model.plan import Op
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine


def alone_s(op: Op, workload: Workload, machine: Machine) -> float:
    """Return the duration of an operation if nothing else runs, s."""
    values = {name: value or 0.0 for name, value in vars(machine).items() if name.endswith("_per_s")}
    if op.kind == "clip":
        return 0.0
    if op.kind == "update":
        return op.params / values[f"{op.resource}_update_params_per_s"]
    if op.kind == "cast":
        return op.params / values["cpu_cast_params_per_s"]
    busy = workload.h2d_busy_share if op.resource == "h2d" else workload.d2h_busy_share
    rate = values[f"{op.resource}_bytes_per_s"] * (1 - busy)
    return op.nbytes / (min(rate, values[f"{op.resource}_pageable_bytes_per_s"]) if op.pageable else rate)


def traffic_bytes(op: Op, workload: Workload) -> float:
    """Return the host memory traffic of an operation.

    An update on the CPU reads and writes state, reads the gradient and writes the parameter. A cast reads fp32 and
    writes a parameter. A copy reads or writes what it moves.
    """
    if op.resource == "gpu" or op.kind == "clip":
        return 0.0
    if op.kind == "update":
        return op.params * (2 * workload.state_bytes + workload.grad_bytes + workload.param_bytes)
    return op.params * (4 + workload.param_bytes) if op.kind == "cast" else op.nbytes


class Fluid:
    """A schedule divided where an operation starts or ends: within a segment all speeds are constant."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self._workload = schedule.workload
        self._machine = machine
        self.work = [alone_s(op, schedule.workload, machine) for op in schedule.plan.ops]
        edges = sorted({0.0, *schedule.starts, *schedule.ends})
        numbers = {time: number for number, time in enumerate(edges)}
        running: list[list[int]] = [[] for _ in edges]
        for index, (_, start, end) in enumerate(schedule.items()):
            for number in range(numbers[start], numbers[end]):
                running[number].append(index)
        ops = schedule.plan.ops
        # (seconds, speed of each operation as a share of its speed alone)
        self.segments = [
            (end - start, self._speeds({index: ops[index] for index in inside}))
            for start, end, inside in zip(edges, edges[1:], running, strict=False)
        ]

    def _speeds(self, ops: dict[int, Op]) -> dict[int, float]:
        demand = {i: traffic_bytes(op, self._workload) / self.work[i] for i, op in ops.items() if self.work[i] > 0}
        link = {i: rate for i, rate in demand.items() if ops[i].resource in ("h2d", "d2h")}
        duplex = self._machine.duplex_bytes_per_s or float("inf")
        of_link = min(1.0, duplex / sum(link.values())) if link else 1.0
        after = {i: rate * (of_link if i in link else 1.0) for i, rate in demand.items()}
        total = sum(after.values())
        of_host = min(1.0, (self._machine.host_memory_bytes_per_s or 0.0) / total) if total else 1.0
        speeds = dict.fromkeys(ops, 1.0)
        for i, op in ops.items():
            if op.resource != "gpu":
                speeds[i] = of_host * (of_link if i in link else 1.0)
        return speeds

    def done(self) -> list[float]:
        """Return the work that each operation got, in seconds of running alone."""
        work = [0.0] * len(self.work)
        for seconds, speeds in self.segments:
            for index, speed in speeds.items():
                work[index] += seconds * speed
        return work
