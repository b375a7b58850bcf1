"""An independent implementation of sharing: the speeds of operations that run at the
same time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from ebbtide.features.storage.kinds import path_of
from ebbtide.interleave.model.plan import Op, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine
from tests.interleave.strategies import cpu_rate


def alone_s(op: Op, plan: Plan, workload: Workload, machine: Machine) -> float:
    """Return the duration of an operation of a plan if nothing else runs, s."""
    values = {
        name: value or 0.0
        for name, value in vars(machine).items()
        if name.endswith("_per_s")
    }
    fixed = machine.operation_s or 0.0
    if op.kind == "clip":
        return norm_s(workload, machine)
    if op.kind == "update" and op.resource == "gpu":
        return fixed + op.params / values["gpu_update_params_per_s"]
    if op.kind == "update":
        rate = plan.cpu_share * cpu_rate(workload, machine)
        if op.is_speculative and not plan.rolls_back:
            rate *= (
                0.9
                if machine.cpu_out_of_place_share is None
                else machine.cpu_out_of_place_share
            )
        return fixed + op.params / rate
    if op.kind == "cast":
        return fixed + op.params / values[f"{op.resource}_cast_params_per_s"]
    if op.kind in ("read", "write"):
        path = machine.storage[path_of(op)]
        return fixed + op.nbytes / (
            path.read_bytes_per_s if op.kind == "read" else path.write_bytes_per_s
        )
    busy = workload.h2d_busy_share if op.resource == "h2d" else workload.d2h_busy_share
    rate = values[f"{op.resource}_bytes_per_s"] * (1 - busy)
    return fixed + op.nbytes / (
        min(rate, values[f"{op.resource}_pageable_bytes_per_s"])
        if op.pageable
        else rate
    )


def norm_s(workload: Workload, machine: Machine) -> float:
    """Return the time of the gradient norm: a pass over the gradients on the host, or
    on the device."""
    if workload.norm is None or not workload.clipping:
        return 0.0
    if workload.norm == "host":
        seconds_per_param = workload.grad_bytes / (
            machine.host_memory_bytes_per_s or math.inf
        )
        return workload.params * (
            1 / machine.cpu_norm_params_per_s
            if machine.cpu_norm_params_per_s
            else seconds_per_param
        )
    # The rate of the GPU is that of updates.
    params = (
        2 * workload.param_bytes if workload.master != "fp32" else workload.param_bytes
    )
    update_bytes = workload.grad_bytes + params + 2 * workload.state_bytes
    return (
        workload.params
        * workload.grad_bytes
        / update_bytes
        / (machine.gpu_update_params_per_s or math.inf)
    )


def traffic_bytes(op: Op, workload: Workload) -> float:
    """Return the host memory traffic of an operation.

    An update on the CPU reads and writes state, reads the gradient and writes the
    parameter, which it also reads if it is a part of the master. A cast reads fp32 and
    writes a parameter. A copy reads or writes what it moves.
    """
    if op.kind == "clip":
        return workload.params * workload.grad_bytes if workload.norm == "host" else 0.0
    if op.resource == "gpu":
        return 0.0
    if op.kind == "update":
        params = (
            2 * workload.param_bytes
            if workload.master != "fp32"
            else workload.param_bytes
        )
        return op.params * (2 * workload.state_bytes + workload.grad_bytes + params)
    return op.params * (4 + workload.param_bytes) if op.kind == "cast" else op.nbytes


def collectives_left(
    phase: str, length_s: float, workload: Workload, machine: Machine
) -> dict[str, float]:
    """Return the share of each direction of the link that the collectives of a phase of
    this length leave."""
    left = {"h2d": 1.0, "d2h": 1.0}
    for name, h2d, d2h in workload.collective_bytes:
        for direction, nbytes in (
            (("h2d", h2d), ("d2h", d2h)) if name == phase and length_s else ()
        ):
            rate = getattr(machine, f"{direction}_bytes_per_s")
            rate *= 1 - getattr(workload, f"{direction}_busy_share")
            left[direction] = max(0.05, 1 - nbytes / (rate * length_s))
    return left


def speeds(
    ops: dict[int, Op],
    work: Mapping[int, float],
    left: Mapping[str, float],
    workload: Workload,
    machine: Machine,
) -> dict[int, float]:
    """Return the speeds of operations that run at the same time, as shares of their
    speeds alone.

    Args:
        ops: The operations, by any number.
        work: Their durations alone, s.
        left: Share of each direction of the link that collectives leave.
        workload: The workload.
        machine: The machine.
    """
    demand = {
        i: left.get(op.resource, 1.0) * traffic_bytes(op, workload) / work[i]
        for i, op in ops.items()
        if work[i] > 0
    }
    factors: dict[int, float] = {}
    groups: dict[object, list[int]] = {}
    for i in demand:
        is_link = ops[i].resource in ("h2d", "d2h")
        groups.setdefault(
            "link"
            if is_link
            else path_of(ops[i])
            if ops[i].kind in ("read", "write")
            else "cpu",
            [],
        ).append(i)
    for group, members in groups.items():
        limit = machine.duplex_bytes_per_s if group == "link" else None
        if isinstance(group, int):
            limit = machine.storage[group].duplex_bytes_per_s
        needed = sum(demand[i] for i in members)
        if group == "link" and limit and needed > limit:
            # The slower direction has what it needs, at most half; the other one has
            # the rest.
            left_over = limit
            for number, i in enumerate(sorted(members, key=demand.__getitem__)):
                got = min(demand[i], left_over / (len(members) - number))
                factors[i], left_over = got / demand[i], left_over - got
            continue
        factors |= dict.fromkeys(
            members, min(1.0, limit / needed) if limit and needed else 1.0
        )
    total = sum(rate * factors[i] for i, rate in demand.items())
    of_host = (
        min(1.0, (machine.host_memory_bytes_per_s or 0.0) / total) if total else 1.0
    )
    return {
        i: 1.0
        if op.resource == "gpu"
        else of_host * factors.get(i, 1.0) * left.get(op.resource, 1.0)
        for i, op in ops.items()
    }


class Fluid:
    """A schedule divided where an operation or a phase starts or ends: within a segment
    all speeds are constant.

    No operation of the plan may block the phases.
    """

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self._workload, self._machine = schedule.workload, machine
        self.work = [
            alone_s(op, schedule.plan, schedule.workload, machine)
            for op in schedule.plan.ops
        ]
        phases = itertools.accumulate(
            (schedule.other_s, schedule.forward_s, schedule.backward_s)
        )
        self._phase_ends = dict(
            zip(("other", "forward", "backward"), phases, strict=True)
        )
        edges = sorted(
            {0.0, *schedule.starts, *schedule.ends, *self._phase_ends.values()}
        )
        numbers = {time: number for number, time in enumerate(edges)}
        running: list[list[int]] = [[] for _ in edges]
        for index, (_, start, end) in enumerate(schedule.items()):
            for number in range(numbers[start], numbers[end]):
                running[number].append(index)
        ops = schedule.plan.ops
        # (seconds, speed of each operation as a share of its speed alone)
        self.segments = [
            (end - start, self._speeds({index: ops[index] for index in inside}, start))
            for start, end, inside in zip(edges, edges[1:], running, strict=False)
        ]

    def _speeds(self, ops: dict[int, Op], start: float) -> dict[int, float]:
        left = self.link_left(start)
        return speeds(
            ops, dict(enumerate(self.work)), left, self._workload, self._machine
        )

    def link_left(self, start: float) -> dict[str, float]:
        """Return the share of each direction of the link that the collectives of the
        phase leave."""
        phase = next(
            (name for name, end in self._phase_ends.items() if start < end), "update"
        )
        begin = {"forward": "other", "backward": "forward"}.get(phase)
        length = self._phase_ends.get(phase, 0.0) - (
            self._phase_ends[begin] if begin else 0.0
        )
        return collectives_left(phase, length, self._workload, self._machine)

    def done(self) -> list[float]:
        """Return the work that each operation got, in seconds of running alone."""
        work = [0.0] * len(self.work)
        for seconds, speeds in self.segments:
            for index, speed in speeds.items():
                work[index] += seconds * speed
        return work
