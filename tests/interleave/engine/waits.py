"""Records what operations of real runs wait for, and compares that with their plans;
random plans to run.

Operations wait for other operations, for inputs (gradients, the factors of the step),
for points that the job has reached, for device memory that others give back, and for
the end of the iteration before. All of these pass through `PlanRun`, `Executor.begin`
and the streams of the device.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ebbtide.errors import PlanError
from ebbtide.features.overlap.policy import late
from ebbtide.features.overlap.speculation import speculate
from ebbtide.features.storage.policy import with_storage
from ebbtide.interleave.engine.devices.device import Mark
from ebbtide.interleave.engine.devices.emulated import EmulatedMark, EmulatedStreams
from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.interleave.engine.runtime import engine as engine_module
from ebbtide.interleave.engine.runtime.executor import Executor
from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.model.operations import OVERLAPS, Overlap
from ebbtide.interleave.model.plan import (
    BACKWARD,
    STEP,
    Op,
    Plan,
    gradient_ready_points,
)
from ebbtide.interleave.model.schedule import exceeds_host
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import POLICIES, Policy, policy
from ebbtide.machines.machine import Machine, StoragePath
from tests.interleave.engine import plans
from tests.interleave.engine.rank_jobs import Result, sharded, train
from tests.interleave.engine.training import MACHINE, throttle_cpu

# So many random plans are drawn until one is valid.
_DRAWS = 200


class Waits:
    """Waits of operations: how many there were of each kind, and those that are not in
    the plan.

    Attributes:
        counts: Waits, by what was waited for; and plans, by what they have.
        unplanned: In words, those that the plan of the operation does not have.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unplanned: set[str] = set()
        self._performing = threading.local()
        self._sources: dict[int, int] = {}
        # Marks stay alive, so that no other has their address.
        self._marks: list[Mark] = []
        self._needed: dict[int, list[set[int]]] = {}
        self._plans: dict[int, Plan] = {}

    def needed(self, plan: Plan) -> list[set[int]]:
        """Return, for each operation of a plan, itself and all that must have ended
        before it."""
        if id(plan) not in self._needed:
            sets: list[set[int]] = []
            for index, op in enumerate(plan.ops):
                sets.append({index}.union(*(sets[before] for before in op.after)))
            self._needed[id(plan)], self._plans[id(plan)] = sets, plan
            self.counts["plans"] += 1
            self.counts["plans with storage"] += bool(plan.stored)
            self.counts["plans that speculate"] += bool(plan.speculated)
            self.counts["plans that speculate with storage"] += bool(
                plan.speculated & plan.stored
            )
            self.counts["plans with late updates"] += plan.has_late_updates
            self.counts["plans with parked state"] += bool(plan.parked)
        return self._needed[id(plan)]

    def check(self, kind: str, op: Op, is_planned: bool) -> None:
        """Count a wait."""
        self.counts[kind] += 1
        if not is_planned:
            speculated = "speculative " if op.is_speculative else ""
            self.unplanned.add(
                f"{speculated}{op.kind} on {op.resource} from {op.start:g} on waits "
                f"for {kind}"
            )

    def begin(self, before: Plan | None, plan: Plan, inputs: Mapping[int, int]) -> None:
        """Check what the operations of an iteration wait for, besides one another."""
        needed = self.needed(plan)
        for index, number in inputs.items():
            op = plan.ops[index]
            if number == engine_module._SCALARS:
                reaches_step = any(plan.ops[one].start >= STEP for one in needed[index])
                self.check("the factors of the step", op, reaches_step)
            elif number == engine_module._ASSUMED_SCALARS:
                self.check(
                    "the first gradient", op, op.is_speculative and op.start > BACKWARD
                )
            else:
                self.check(
                    "its gradient",
                    op,
                    op.kind == "gradient down" and op.subgroup == number,
                )
        if before is not None and before.has_late_operations:
            for op in plan.ops:
                self.check("the late operations before", op, op.start >= BACKWARD)

    def issue(self, index: int, mark: Mark) -> None:
        """Note which operation a mark is behind."""
        self._sources[id(mark)] = index
        self._marks.append(mark)

    def before(self, run: PlanRun, index: int, marks: Sequence[Mark]) -> None:
        """Check the marks that the stream of an operation waits for; others than those
        of operations are of the job."""
        for mark in marks:
            source = self._sources.get(id(mark))
            if source is not None:
                self.check(
                    "an operation",
                    run.plan.ops[index],
                    source in self.needed(run.plan)[index],
                )

    @contextmanager
    def performing(self, op: Op) -> Iterator[None]:
        """Let waits of this thread be those of an operation."""
        self._performing.op = op
        try:
            yield
        finally:
            self._performing.op = None

    def block(self, kind: str) -> None:
        """Check a wait of the operation that this thread performs, if there is one."""
        op: Op | None = getattr(self._performing, "op", None)
        if op is not None:
            self.check(kind, op, kind == "device memory" and op.takes > 0)


@contextmanager
def recorded_waits() -> Iterator[Waits]:
    """Return a context in which waits of all operations are recorded."""
    waits = Waits()
    latest: dict[int, Plan] = {}
    begin, issue, marks_before, perform = (
        Executor.begin,
        PlanRun.issue,
        PlanRun.marks_before,
        Store.perform,
    )
    stop, wait, synchronize = (
        Executor.stop,
        EmulatedStreams.wait,
        EmulatedMark.synchronize,
    )

    def begin_and_check(
        self: Executor, plan: Plan, inputs: Any = None, begin_s: float | None = None
    ) -> None:
        waits.begin(latest.get(id(self)), plan, inputs or {})
        latest[id(self)] = plan
        begin(self, plan, inputs, begin_s)

    def stop_and_forget(self: Executor) -> PlanRun | None:
        latest.pop(id(self), None)
        return stop(self)

    def issue_and_note(self: PlanRun, index: int, end: Mark) -> None:
        waits.issue(index, end)
        issue(self, index, end)

    def checked_marks(self: PlanRun, index: int) -> list[Mark]:
        marks = marks_before(self, index)
        waits.before(self, index, marks)
        return marks

    def perform_and_check(self: Store, op: Op) -> None:
        with waits.performing(op):
            perform(self, op)

    def wait_and_check(
        self: EmulatedStreams, stream: Any, marks: Sequence[Mark]
    ) -> None:
        if marks:
            waits.block("device memory")
        wait(self, stream, marks)

    def synchronize_and_check(self: EmulatedMark) -> None:
        waits.block("the device")
        synchronize(self)

    patches: list[tuple[type, str, Callable[..., Any]]] = [
        (Executor, "begin", begin_and_check),
        (Executor, "stop", stop_and_forget),
        (PlanRun, "issue", issue_and_note),
        (PlanRun, "marks_before", checked_marks),
        (Store, "perform", perform_and_check),
        (EmulatedStreams, "wait", wait_and_check),
        (EmulatedMark, "synchronize", synchronize_and_check),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(patch.object(owner, name, replacement))
        yield waits


def _with_prompt_gradients(plan: Plan, workload: Workload) -> Plan:
    """Return a plan that copies gradients to the host as soon as they are there."""
    points = gradient_ready_points(workload)
    ops = [
        op._replace(start=points[op.subgroup]) if op.kind == "gradient down" else op
        for op in plan.ops
    ]
    return replace(plan, ops=tuple(ops))


def _drawn(draw: random.Random, workload: Workload, overlap: Overlap) -> Plan:
    """Return a random plan, which need not be valid."""
    count = len(workload.subgroups)
    # Only updates on the CPU can be speculative. Where updates read parameters there is
    # nothing to cast.
    weights = {
        "cpu": 4,
        "cast": 2 if workload.master == "fp32" else 0,
        "resident": 1,
        "streamed": 1,
        "parked": 1,
    }
    placements = draw.choices([*weights], [*weights.values()], k=count)
    kept = [subgroup for subgroup in range(count) if draw.random() < 0.3]
    plan = plans.make(workload, placements, kept, draw.randrange(2**32))
    if not workload.gradients_held_until_step and draw.random() < 0.8:
        plan = _with_prompt_gradients(plan, workload)
    if overlap.backward:
        plan = speculate(
            plan,
            workload,
            draw.randint(count // 2, count),
            uploads_first=draw.random() < 0.3,
        )
    return late(plan, workload) if overlap.forward else plan


@contextmanager
def random_policy() -> Iterator[None]:
    """Register the policy `random:SEED`: any placement and order, as the option
    `overlap` says."""

    @policy("random", overlap=tuple(OVERLAPS))
    def random_plan(workload: Workload, machine: Machine, chosen: Policy) -> Plan:
        """Make a random plan."""
        draw, overlap = random.Random(chosen.value), OVERLAPS[chosen.options["overlap"]]
        for _ in range(_DRAWS):
            # An operation of a random plan may wait for one that comes later, or is
            # late, in one with overlap.
            with suppress(PlanError):
                plan = with_storage(
                    _drawn(draw, workload, overlap).validate(workload),
                    workload,
                    machine,
                )
                if not exceeds_host(plan, workload, machine):
                    return plan
        raise PlanError("none of the random plans is valid, or none fits")

    try:
        yield
    finally:
        del POLICIES["random"]


@contextmanager
def random_optimizer(
    model: nn.Module, seed: int, folder: Path
) -> Iterator[InterleavedOptimizer]:
    """Yield an optimizer with a random plan, whose masters may be remainders and whose
    state may be in storage."""
    draw = random.Random(seed)
    overlap = draw.choice([*OVERLAPS])
    has_bf16 = all(param.dtype == torch.bfloat16 for param in model.parameters())
    rule = "adamw-remainder" if has_bf16 and draw.random() < 0.5 else "adamw"
    streams = overlap in ("backward", "both") or draw.random() < 0.5
    options: dict[str, Any] = {}
    if draw.random() < 0.8:
        folder.mkdir(parents=True)
        path = StoragePath(1e8, 1e8, path=str(folder))
        options |= {"storage": folder, "host_memory_budget": draw.choice([33e3, 40e3])}
        options["machine"] = replace(MACHINE, storage=(path,))
    optimizer = InterleavedOptimizer(
        model.parameters(),
        rule,
        policy=f"random:{seed}",
        overlap=overlap,
        gradients="streamed" if streams else "kept",
        model=model,
        max_grad_norm=draw.choice([1e-3, 1e6]),
        memory_budget=1e9,
        threads=1,
        subgroup_params=draw.choice([300, 500]),
        **{"machine": MACHINE, **options},
    )
    throttle_cpu(optimizer, lambda: 2e6)
    try:
        yield optimizer
    finally:
        optimizer.close()


def waits_of_shards(rank: int, folder: Path) -> Result:
    """Return the unplanned waits, and the counts of waits, of random plans on
    shards."""
    with random_policy(), recorded_waits() as waits:
        for seed in range(8):
            model = sharded()
            with random_optimizer(
                model, seed, folder / f"state-{seed}-{rank}"
            ) as optimizer:
                train(model, optimizer, rank, steps=4)
    return {"unplanned": sorted(waits.unplanned), "counts": dict(waits.counts)}


JOBS = (waits_of_shards,)
