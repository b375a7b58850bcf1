"""Runs of a plan on symbols in place of numbers: do all orders in which its operations
may run give right results?

This knows what each kind of operation does to memory, and nothing of the check of
plans. An operation may start when those that it waits for have ended, its lane is idle
and its point is reached. It may run for any time: its results are there when it ends,
and until then nobody may change what it works with, or use what it writes. One
operation at a time is delayed as long as anything else can happen, before it starts or
before it ends: so of any two that do not wait for each other either order is run, and
that both run at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.errors import PlanError
from ebbtide.features.storage.kinds import path_of
from ebbtide.interleave.model.operations import (
    CLIPPING_FIRST,
    ONE_UPDATE,
    ONE_UPLOAD,
    OWN_GRADIENT,
    UPDATE,
    gradient_ready_points,
)
from ebbtide.interleave.model.plan import Op, Plan
from ebbtide.interleave.model.workload import Workload

# A place in memory, and the subgroup (or else) that it is of.
Cell = tuple[str, int]
_OLD, _OWN, _FACTOR, _ASSUMED = "old state", "own gradient", "factor", "assumed factor"
# A rule of storage: gradients are not there.
_STATE_ONLY = "storage has state only"
# Points that differ by less differ by rounding.
_ROUNDING = 1e-9


@dataclass
class Effect:
    """The cells that an operation reads and writes, and those that it leaves empty."""

    reads: list[Cell]
    writes: list[Cell]
    empties: list[Cell]


class SymbolicRuns:
    """Runs one plan; `compute_waits`: whether compute stops for operations that are
    blocking, or needed at a point."""

    def __init__(
        self, plan: Plan, workload: Workload, compute_waits: bool = False
    ) -> None:
        self.plan = plan
        self.rules = plan.departures.rules
        self.compute_waits = compute_waits
        self.clips = workload.clipping and CLIPPING_FIRST not in self.rules
        self._until_step = workload.gradients_held_until_step
        self.ready = (
            [UPDATE] * plan.subgroups
            if self._until_step
            else gradient_ready_points(workload)
        )
        self.casts = {op.subgroup: op.resource for op in plan.ops if op.kind == "cast"}
        self._paths = {op.subgroup: path_of(op) for op in plan.ops if op.kind == "read"}
        needed = {
            op.holds.point for op in plan.ops if op.holds is not None and not op.is_late
        }
        self.points = sorted({op.start for op in plan.ops} | {*self.ready} | needed)
        self.effects = [self._effect(index, op) for index, op in enumerate(plan.ops)]

    def problems(self) -> Iterator[str]:
        """Yield in words what goes wrong in each order that gives wrong results."""
        for index, op in enumerate(self.plan.ops):
            for event in ("start", "end"):
                problem = _Run(self, index, event == "start").problem()
                if problem is not None:
                    yield f"late {event} of {op.kind} of {op.subgroup}: {problem}"

    def homes(self, subgroup: int) -> list[Cell]:
        """Return where a subgroup's state is when the iteration begins and ends."""
        if ONE_UPDATE in self.rules:
            names = ["state@host", "state@gpu"]
        elif subgroup in self.plan.resident | self.plan.parked:
            names = ["state@gpu"]
        elif subgroup in self._paths:
            names = [f"state in file {self._paths[subgroup]}"]
        else:
            names = ["state@host"]
        return [(name, subgroup) for name in names]

    def _effect(self, index: int, op: Op) -> Effect:
        effects: dict[
            str, Callable[[int, Op], tuple[list[str], list[str], list[str]]]
        ] = {
            "gradient down": self._gradient_down,
            "gradient up": lambda index, op: (["grad@host"], ["grad@gpu"], []),
            "fetch": lambda index, op: (["state@host"], ["state@gpu"], ["state@host"]),
            "flush": lambda index, op: (["state@gpu"], ["state@host"], ["state@gpu"]),
            "update": self._update,
            "cast": self._cast,
            "upload": self._upload,
            "read": self._read,
            "write": self._write,
            "activation down": lambda index, op: ([], [f"activation {op.tag}"], []),
            "activation up": lambda index, op: (
                [f"activation {op.tag}"],
                [],
                [f"activation {op.tag}"],
            ),
        }
        if op.kind == "clip":
            copied = {
                one.subgroup
                for one in self.plan.ops[:index]
                if one.kind == "gradient down"
            }
            every = range(self.plan.subgroups)
            return Effect(
                [("grad@host" if one in copied else "job", one) for one in every],
                [("factor", -1)],
                [],
            )
        if op.kind not in effects:
            return Effect([], [], [])
        names = effects[op.kind](index, op)
        reads, writes, empties = (
            [(name, op.subgroup) for name in part] for part in names
        )
        if op.kind == "update" and self.clips and not op.is_speculative:
            reads.append(("factor", -1))
        return Effect(reads, writes, empties)

    def _gradient_down(
        self, index: int, op: Op
    ) -> tuple[list[str], list[str], list[str]]:
        stays = (
            self._until_step
            or op.subgroup in self.plan.kept_gradients
            or ONE_UPDATE in self.rules
        )
        return ["job"], ["grad@host"], [] if stays else ["job"]

    def _update(self, index: int, op: Op) -> tuple[list[str], list[str], list[str]]:
        if op.resource == "cpu":
            reads = (
                ["state@host"]
                if OWN_GRADIENT in self.rules
                else ["state@host", "grad@host"]
            )
            return (
                reads,
                ["state@host"]
                if op.subgroup in self.casts
                else ["state@host", "param@host"],
                [],
            )
        is_part = ONE_UPDATE in self.rules
        gradient = (
            "job" if is_part or op.subgroup in self.plan.kept_gradients else "grad@gpu"
        )
        return (
            ["state@gpu", gradient],
            ["state@gpu"] if is_part else ["state@gpu", "param@gpu"],
            [],
        )

    def _cast(self, index: int, op: Op) -> tuple[list[str], list[str], list[str]]:
        if op.resource == "gpu":
            return ["masters"], ["param@gpu"], []
        return ["state@host"], ["param@host"], []

    def _upload(self, index: int, op: Op) -> tuple[list[str], list[str], list[str]]:
        updated = {
            one.subgroup for one in self.plan.ops[:index] if one.kind == "update"
        }
        if ONE_UPLOAD in self.rules and op.subgroup not in updated:
            return [], [], []
        if self.casts.get(op.subgroup) == "gpu":
            return ["state@host"], ["masters"], []
        return ["param@host"], ["param@gpu"], []

    def _read(self, index: int, op: Op) -> tuple[list[str], list[str], list[str]]:
        state, gradient = f"state in file {path_of(op)}", f"grad in file {path_of(op)}"
        return (
            [state, gradient] if _STATE_ONLY in self.rules else [state],
            ["state@host"],
            [state],
        )

    def _write(self, index: int, op: Op) -> tuple[list[str], list[str], list[str]]:
        if op.tag is None:
            return ["grad@host"], [f"grad in file {path_of(op)}"], []
        return ["state@host"], [f"state in file {path_of(op)}"], ["state@host"]


class _Run:
    """One order of the operations: one of them is delayed before it starts (`at_start`)
    or before it ends."""

    def __init__(self, runs: SymbolicRuns, delayed: int, at_start: bool) -> None:
        self._runs, self._delayed, self._at_start = runs, delayed, at_start
        self._ops = runs.plan.ops
        self._memory: dict[Cell, Any] = {
            home: _OLD
            for subgroup in range(runs.plan.subgroups)
            for home in runs.homes(subgroup)
        }
        self._points = [*runs.points]
        self._point = -1.0
        # Subgroups whose gradient the backward has not computed yet.
        self._unready = set(range(runs.plan.subgroups))
        self._waiting = [len(set(op.after)) for op in self._ops]
        self._dependents: list[list[int]] = [[] for _ in self._ops]
        for index, op in enumerate(self._ops):
            for before in set(op.after):
                self._dependents[before].append(index)
        self._startable = [
            index for index, count in enumerate(self._waiting) if not count
        ]
        self._inputs: dict[int, list[Any]] = {}
        self._running: list[int] = []
        self._undone = set(range(len(self._ops)))
        # By buffer: the subgroup whose state is in it.
        self._buffers: dict[int, int] = {}
        self._problem: str | None = None

    def problem(self) -> str | None:
        """Run all operations and return what goes wrong first, or is wrong in the
        end."""
        while self._undone and self._problem is None:
            if not (
                self._start_any()
                or self._advance()
                or self._end_any()
                or self._release()
            ):
                return "operations wait for each other"
        return self._problem or self._wrong_result()

    def _wrong_result(self) -> str | None:
        factor = _FACTOR if self._runs.clips else None
        on_host = None if OWN_GRADIENT in self._runs.rules else _OWN
        for subgroup in range(self._runs.plan.subgroups):
            homes = self._runs.homes(subgroup)
            new = {
                home: (_OLD, _OWN if home[0] == "state@gpu" else on_host, factor)
                for home in homes
            }
            for cell, value in {**new, ("param@gpu", subgroup): new[homes[0]]}.items():
                if self._memory.get(cell) != value:
                    return f"{cell} has {self._memory.get(cell)}"
        return None

    def _can_start(self, index: int) -> bool:
        op = self._ops[index]
        return op.start <= self._point and all(
            self._ops[one].resource != op.resource for one in self._running
        )

    def _start_any(self) -> bool:
        for index in self._startable:
            if self._can_start(index) and not (
                self._at_start and index == self._delayed
            ):
                self._start(index)
                return True
        return False

    def _end_any(self) -> bool:
        for index in self._running:
            if index != self._delayed:
                self._end(index)
                return True
        return False

    def _release(self) -> bool:
        """Let what is delayed start or end, since nothing else can happen."""
        index, self._delayed = self._delayed, -1
        if index in self._running:
            self._end(index)
        return index >= 0

    def _advance(self) -> bool:
        """Let compute reach the next point, unless it waits for an operation."""
        if not self._points:
            return False
        point = self._points[0]
        for index in self._undone if self._runs.compute_waits else ():
            op = self._ops[index]
            if op.holds is not None and not op.is_late and op.holds.point < point:
                return False
        self._point = self._points.pop(0)
        for subgroup in [
            one for one in self._unready if self._runs.ready[one] < point + _ROUNDING
        ]:
            self._unready.remove(subgroup)
            self._memory["job", subgroup] = _OWN
        return True

    def _start(self, index: int) -> None:
        op, effect = self._ops[index], self._runs.effects[index]
        self._startable.remove(index)
        self._running.append(index)
        self._inputs[index] = [self._memory.get(cell) for cell in effect.reads]
        for cell, value in zip(effect.reads, self._inputs[index], strict=True):
            is_gradient = cell[0].startswith(("job", "grad"))
            if value is None or value == "in work" or (is_gradient and value != _OWN):
                self._problem = f"{op.kind} of {op.subgroup} finds {value} in {cell}"
        for cell in (*effect.writes, *effect.empties):
            self._memory[cell] = "in work"
        if op.kind == "read":
            if op.tag in self._buffers:
                self._problem = (
                    f"{op.kind} of {op.subgroup} finds another state in its buffer"
                )
            self._buffers[op.tag] = op.subgroup

    def _end(self, index: int) -> None:
        op, effect = self._ops[index], self._runs.effects[index]
        now = dict(zip(effect.reads, self._inputs[index], strict=True))
        now |= dict.fromkeys((*effect.writes, *effect.empties), "in work")
        for cell, value in now.items():
            if self._memory.get(cell) != value:
                self._problem = (
                    f"{op.kind} of {op.subgroup} works with {cell} while others change "
                    "it"
                )
        for cell in effect.empties:
            del self._memory[cell]
        for cell in effect.writes:
            self._memory[cell] = self._result(op, self._inputs[index])
        if op.kind == "clip":
            self._confirm()
        if op.kind == "write":
            self._buffers.pop(op.tag, None)
        self._running.remove(index)
        self._undone.remove(index)
        for dependent in self._dependents[index]:
            self._waiting[dependent] -= 1
            if not self._waiting[dependent]:
                self._startable.append(dependent)

    def _result(self, op: Op, inputs: list[Any]) -> Any:
        if op.kind == "clip":
            return _FACTOR
        if op.kind != "update":
            return inputs[0] if inputs else "activation"
        factor = _FACTOR if _FACTOR in inputs else None
        if op.is_speculative and self._runs.clips:
            # It is computed again if clipping changes it, whether it runs or has ended.
            factor = self._memory.get(("factor", -1), _ASSUMED)
            factor = factor if factor == _FACTOR else _ASSUMED
        return (inputs[0], _OWN if _OWN in inputs else None, factor)

    def _confirm(self) -> None:
        """Let results of speculative updates be right where these have put them: copies
        and casts of them are not."""
        for op in self._ops:
            if op.is_speculative:
                names = (
                    ["state@host"]
                    if op.subgroup in self._runs.casts
                    else ["state@host", "param@host"]
                )
                for cell in ((name, op.subgroup) for name in names):
                    value = self._memory.get(cell)
                    if isinstance(value, tuple) and value[2] == _ASSUMED:
                        self._memory[cell] = (*value[:2], _FACTOR)


def is_refused(plan: Plan, workload: Workload) -> bool:
    """Return whether a plan is not valid."""
    try:
        plan.validate(workload)
    except PlanError:
        return True
    return False


def with_one_wait_less(
    plan: Plan, draw: random.Random, count: int
) -> Iterator[tuple[str, Plan]]:
    """Yield so many plans, with the names of the operation that waits no more and of
    the one for which it did."""
    waits = [
        (index, before) for index, op in enumerate(plan.ops) for before in op.after
    ]
    for index, before in draw.sample(waits, min(count, len(waits))):
        op = plan.ops[index]
        fewer = op._replace(after=tuple(one for one in op.after if one != before))
        changed = replace(plan, ops=(*plan.ops[:index], fewer, *plan.ops[index + 1 :]))
        yield f"{op.name} without {plan.ops[before].name}", changed


def assert_refused_where_results_are_wrong(
    plan: Plan, workload: Workload, draw: random.Random, count: int
) -> None:
    """Check that a plan gives right results in every order, and that it is refused with
    a dependency less exactly where it does not give them any more."""
    assert next(SymbolicRuns(plan, workload).problems(), None) is None
    for name, changed in with_one_wait_less(plan, draw, count):
        problem = next(SymbolicRuns(changed, workload).problems(), None)
        assert is_refused(changed, workload) == (problem is not None), (name, problem)
