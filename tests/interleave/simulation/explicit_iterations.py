"""An independent event loop: iterations of a plan laid end to end, with the job,
resources and buffers as objects.

It follows the definitions in docs/model.md and docs/storage.md, and knows nothing of
how the simulator works.

- The job passes through the points of each iteration in turn. At a point it waits for
  what the iteration before has due there; only then has it reached the point, and
  operations of the point may start. It then waits for operations of the point that
  block. It stands still while a late operation runs on the GPU, and at the end of the
  step until all operations that are not late have ended.
- A resource runs one operation at a time: of those that are ready the one of the oldest
  iteration, first in the plan.
- A buffer has the state of one subgroup, from the start of its read to the end of its
  write, whatever the iteration. A read waits for its buffer. A valid plan never needs
  that, since the engine knows no such wait: what a plan leaves out is noted, and so is
  an operation on state that is in no buffer.
- Collectives take their share of the link while the job computes, and none while it
  stands still.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from ebbtide.interleave.model.plan import (
    BACKWARD,
    FORWARD,
    OTHER,
    STEP,
    UPDATE,
    Op,
    Plan,
)
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine
from tests.interleave.simulation.fluid import alone_s, collectives_left, speeds

# What is left of an operation, as a share of the time so far, when it has ended but for
# rounding.
_ROUNDING = 1e-12


class Iteration(NamedTuple):
    """Times of one iteration, s from its start.

    Attributes:
        length_s: Its length.
        starts: Start of each operation.
        ends: End of each operation.
    """

    length_s: float
    starts: list[float]
    ends: list[float]


class Run(NamedTuple):
    """Iterations in a row.

    Attributes:
        iterations: Their times.
        faults: Reads that had nothing to wait for but their buffer, and operations on
            state that was in none.
    """

    iterations: list[Iteration]
    faults: list[str]


class Deadlock(Exception):
    """Nothing runs, and something waits."""


class _Key(NamedTuple):
    """An operation of one iteration; earlier ones sort first."""

    iteration: int
    index: int


@dataclass
class _Job:
    """The training job: where it is, and how much compute is left until the next
    point."""

    iteration: int = 0
    stop: int = 0
    left_s: float = 0.0
    has_reached: bool = False
    begins: list[float] = field(default_factory=list)


def run_explicitly(plan: Plan, workload: Workload, machine: Machine, count: int) -> Run:
    """Run `count` iterations in a row, the first one on an idle machine."""
    return _Loop(plan, workload, machine, count).run()


class _Loop:
    def __init__(
        self, plan: Plan, workload: Workload, machine: Machine, count: int
    ) -> None:
        self._plan, self._workload, self._machine, self._count = (
            plan,
            workload,
            machine,
            count,
        )
        points = {
            OTHER,
            FORWARD,
            BACKWARD,
            UPDATE,
            *(op.start for op in plan.ops if op.start <= UPDATE),
        }
        points |= {op.due for op in plan.ops if op.is_late}
        self._points = [*sorted(points), STEP]
        self._work = [alone_s(op, plan, workload, machine) for op in plan.ops]
        self._lengths = {
            "other": workload.other_s,
            "forward": workload.forward_s,
            "backward": workload.backward_s,
        }
        self._now = 0.0
        self._job = _Job()
        # The point of each iteration that the job has reached.
        self._reached = [-1.0] * (count + 1)
        self._waiting: set[_Key] = set()
        self._running: dict[object, _Key] = {}
        self._left_s: dict[_Key, float] = {}
        self._starts: dict[_Key, float] = {}
        self._ends: dict[_Key, float] = {}
        # Whose state is in each buffer, of which iteration; and the buffers that are
        # being written.
        self._owner: dict[int, tuple[int, int]] = {}
        self._written: set[int] = set()
        self._buffer_of = {op.subgroup: op.tag for op in plan.ops if op.kind == "read"}
        self._casts_on_gpu = {
            op.subgroup for op in plan.ops if op.kind == "cast" and op.resource == "gpu"
        }
        self._faults: list[str] = []

    def run(self) -> Run:
        while len(self._job.begins) <= self._count or self._running or self._waiting:
            while self._start_operations() or self._move_job():
                pass
            if (
                len(self._job.begins) > self._count
                and not self._running
                and not self._waiting
            ):
                break
            self._pass_time()
        begins = self._job.begins
        iterations = [
            Iteration(
                begins[number + 1] - begins[number],
                *(
                    [
                        times[_Key(number, index)] - begins[number]
                        for index in range(len(self._plan.ops))
                    ]
                    for times in (self._starts, self._ends)
                ),
            )
            for number in range(self._count)
        ]
        return Run(iterations, self._faults)

    def _op(self, key: _Key) -> Op:
        return self._plan.ops[key.index]

    def _move_job(self) -> bool:
        """Let the job do what takes no time; return whether it did."""
        job = self._job
        if job.left_s > 0 or job.iteration > self._count:
            return False
        point = self._points[job.stop]
        if not job.has_reached:
            if not self._may_reach(point):
                return False
            if point == OTHER:
                job.begins.append(self._now)
                if job.iteration == self._count:
                    # One more beginning than iterations; what it would start does not
                    # matter.
                    job.iteration += 1
                    return True
                self._waiting |= {
                    _Key(job.iteration, index) for index in range(len(self._plan.ops))
                }
            job.has_reached = True
            self._reached[job.iteration] = point
            return True
        blocking = [
            index
            for index, op in enumerate(self._plan.ops)
            if op.is_blocking and op.start == point
        ]
        if any(_Key(job.iteration, index) not in self._ends for index in blocking):
            return False
        job.has_reached = False
        job.stop += 1
        if job.stop < len(self._points):
            job.left_s = self._seconds_between(point, self._points[job.stop])
        else:
            job.stop = 0
            job.iteration += 1
        return True

    def _may_reach(self, point: float) -> bool:
        """Return whether all has ended that the iteration before must have ended at a
        point of this one."""
        before = self._job.iteration - 1
        if before < 0:
            return True
        due = [
            index
            for index, op in enumerate(self._plan.ops)
            if (point == OTHER if not op.is_late else op.due <= point)
        ]
        return all(_Key(before, index) in self._ends for index in due)

    def _seconds_between(self, begin: float, end: float) -> float:
        if begin >= UPDATE:
            return self._machine.step_overhead_s or 0.0
        return (end - begin) * list(self._lengths.values())[math.floor(begin)]

    def _start_operations(self) -> bool:
        """Start operations that are ready on resources that are idle; return whether
        any did."""
        started = False
        for key in sorted(self._waiting):
            op = self._op(key)
            resource = op.resource
            is_ready = op.start <= self._reached[key.iteration] and all(
                _Key(key.iteration, before) in self._ends for before in op.after
            )
            if (
                not is_ready
                or resource in self._running
                or not self._has_buffer(key, op)
            ):
                continue
            self._waiting.remove(key)
            self._running[resource] = key
            self._left_s[key] = self._work[key.index]
            self._starts[key] = self._now
            started = True
        return started

    def _has_buffer(self, key: _Key, op: Op) -> bool:
        """Return whether an operation that is ready otherwise may start, as far as
        buffers are concerned."""
        buffer = self._buffer_of.get(op.subgroup)
        if buffer is None:
            return True
        own = key.iteration, op.subgroup
        if op.kind == "read":
            if buffer in self._written or self._owner.get(buffer, own) != own:
                self._faults.append(
                    f"{op.kind} of {own} has only its buffer to wait for"
                )
                return False
            self._owner[buffer] = own
        elif op.kind == "write" and op.tag is not None:
            self._written.add(buffer)
        is_used = {
            "update": op.resource == "cpu",
            # The cast reads the master. Where the GPU casts, the upload does.
            "cast": op.resource == "cpu",
            "upload": op.subgroup in self._casts_on_gpu,
            "fetch": True,
            "flush": True,
            "write": op.tag is not None,
        }
        if is_used.get(op.kind, False) and self._owner.get(buffer) != own:
            self._faults.append(f"{op.kind} of {own} finds another state in its buffer")
        return True

    def _pass_time(self) -> None:
        """Let time pass until the next operation ends or the job is at its next
        point."""
        job = self._job
        keys = dict(enumerate(self._running.values()))
        ops = {number: self._op(key) for number, key in keys.items()}
        gpu_needed = any(op.resource == "gpu" and op.is_late for op in ops.values())
        computes = job.left_s > 0 and job.iteration < self._count and not gpu_needed
        left = {"h2d": 1.0, "d2h": 1.0}
        if computes and self._points[job.stop - 1] < UPDATE:
            phase = list(self._lengths)[math.floor(self._points[job.stop - 1])]
            left = collectives_left(
                phase, self._lengths[phase], self._workload, self._machine
            )
        work = {number: self._work[key.index] for number, key in keys.items()}
        speed = speeds(ops, work, left, self._workload, self._machine)
        passing_s = min(
            [self._left_s[key] / speed[number] for number, key in keys.items()]
            + [job.left_s] * computes,
            default=math.inf,
        )
        if passing_s == math.inf:
            raise Deadlock
        self._now += passing_s
        rounding_s = _ROUNDING * self._now
        if computes:
            job.left_s -= passing_s
            if job.left_s <= rounding_s:
                job.left_s = 0.0
        for number, key in keys.items():
            self._left_s[key] -= passing_s * speed[number]
            if self._left_s[key] <= rounding_s * speed[number]:
                op = self._op(key)
                self._ends[key] = self._now
                del self._running[op.resource], self._left_s[key]
                if op.kind == "write" and op.tag is not None:
                    del self._owner[op.tag]
                    self._written.remove(op.tag)
