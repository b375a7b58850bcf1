"""CudaDevice under random plans: streams and events order all accesses to memory, and
all operations of the plan."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.interleave.engine.runtime.arena import plan_bytes, worst_case
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.model.plan import Op, Plan
from tests.conftest import examples
from tests.interleave.engine.devices.fake_cuda import (
    CheckedDevice,
    CheckedKernel,
    FakeCuda,
    install,
    job_tensor,
    open_fake,
)
from tests.interleave.engine.devices.happens_before import HOST, Clock
from tests.interleave.engine.plans import PLACEMENTS, make, plans, workload_of
from tests.interleave.engine.twins import (
    Jitter,
    Twin,
    hasty_switches,
    no_thread_left,
    twins,
)

EXAMPLES = examples(40, by_default=6)


@dataclass
class Ran:
    """An operation that was performed: where, and what was before it."""

    actor: str
    before: Clock
    end: int


@dataclass
class Bench:
    """An engine on a fake GPU, and a job with its own stream."""

    cuda: FakeCuda
    device: CheckedDevice
    engine: Engine
    twin: Twin
    # By execution of a plan: operations, and the points that the job reported with the
    # time of its stream.
    ran: dict[PlanRun | None, dict[Op, Ran]] = field(default_factory=dict)
    points: dict[PlanRun | None, list[tuple[float, int]]] = field(default_factory=dict)
    memory: list[np.ndarray] = field(default_factory=list)
    # Whether the wait that was left out orders anything.
    is_missed: bool = False

    def __post_init__(self) -> None:
        executor, order = self.engine._executor, self.cuda.order
        perform, advance_to = executor._perform, executor.advance_to

        def recorded(op: Op) -> None:
            run = executor._run
            actor = (
                HOST if op.resource == "cpu" else self.device.stream_name(op.resource)
            )
            before = order.clock(HOST) if actor == HOST else order.issue(actor)
            self._judge(before)
            perform(op)
            if actor == HOST:
                order.access("operation", HOST, [], [torch.empty(1)])
            end = order.clock(HOST) if actor == HOST else order.issue(actor)
            self.ran.setdefault(run, {})[op] = Ran(actor, before, end.get(actor, 0))

        def reported(point: float) -> None:
            self.points.setdefault(executor._run, []).append(
                (point, order.clock("job").get("job", 0))
            )
            advance_to(point)

        executor._perform = recorded
        executor.advance_to = reported  # type: ignore[method-assign]

    def step(self, scale: float, offloaded_share: float) -> None:
        """Run an iteration of the job: forward and backward on its stream, then the
        step."""
        cuda, engine, twin = self.cuda, self.engine, self.twin
        cuda.order.access("forward", "job", twin.params, [])
        update = twin.update(scale)
        gradients = {}
        for index, gradient in enumerate(update.gradients):
            if gradient is None:
                continue
            gradients[index] = job_tensor(cuda, gradient, self.memory)
            if engine.is_running and random.random() < offloaded_share:
                engine.offload_gradient(index, gradients.pop(index))
                engine.report_progress(random.random())
        update.gradients.clear()
        cuda.order.access("end of the backward", "job", twin.params, [])
        engine.submit_gradients(gradients)
        del gradients
        run = engine._executor._run
        engine.step(update.values, update.scalars)
        cuda.order.access("next forward", "job", twin.params, [])
        assert run is not None
        self._check(run.plan, self.ran.pop(run), self.points.pop(run))
        twin.check()

    def _judge(self, before: Clock) -> None:
        """Note whether the wait that was left out would have ordered anything before
        the operation that follows it."""
        if (
            self.cuda.left_out is not None
            and self.cuda.left_out[1] == threading.get_ident()
        ):
            clocks = self.cuda.left_out[0]
            self.is_missed = any(
                before.get(key, 0) < time
                for clock in clocks
                for key, time in clock.items()
            )
            self.cuda.left_out = None

    def problems(self) -> list[str]:
        return self.cuda.order.races

    def _check(
        self, plan: Plan, all_ran: dict[Op, Ran], points: list[tuple[float, int]]
    ) -> None:
        """Add to the problems what the order of the plan's operations lacks."""
        for op in plan.ops:
            ran = all_ran[op]
            for dependency in op.after:
                early = all_ran[plan.ops[dependency]]
                if ran.before.get(early.actor, 0) < early.end:
                    self.problems().append(
                        f"{op.kind} {op.subgroup} is not after "
                        f"{plan.ops[dependency].kind}"
                    )
            reported = [time for point, time in points if point >= op.start]
            if (
                ran.actor != HOST
                and reported
                and ran.before.get("job", 0) < reported[0]
            ):
                self.problems().append(
                    f"{op.kind} {op.subgroup} is before its point {op.start}"
                )


@contextmanager
def bench(twin: Twin, seed: int = 0, **changes: Any) -> Iterator[Bench]:
    """Yield an engine on a fake GPU, with attributes of `FakeCuda` changed after the
    constructor of the engine."""
    with pytest.MonkeyPatch.context() as patch, no_thread_left(), hasty_switches():
        cuda = install(patch)
        device, kernel = open_fake(cuda), CheckedKernel(cuda)
        cuda.pause = Jitter(seed, 2e-4)
        engine = Engine(Store(twin.subgroups, device, kernel), len(twin.params))
        try:
            twin.begin(engine.store)
            setup = Bench(cuda, device, engine, twin)
            cuda.waits = 0
            for name, value in changes.items():
                setattr(cuda, name, value)
            yield setup
        finally:
            cuda.careless = set()
            engine.close()
            device.close()
            kernel.close()
        assert device.used_bytes == 0


@settings(max_examples=EXAMPLES)
@given(twins(), st.data(), st.integers(0, 2**32))
def test_cuda__random_plans_have_no_race(
    twin: Twin, data: st.DataObject, seed: int
) -> None:
    """The bits are those of the reference, and memory stays within that of the plan."""
    random.seed(seed)
    stay = data.draw(st.booleans())
    clipping = not stay or data.draw(st.booleans())
    width = max(subgroup.dtype.itemsize for subgroup in twin.subgroups)
    workload = workload_of(twin.sizes, clipping, stay, width)
    with bench(twin, seed) as setup:
        for _ in range(2):
            plan = data.draw(plans(workload))
            setup.engine.set_plan(plan, workload)
            for _ in range(2):
                setup.step(0.75 if clipping else 1.0, 0.0 if stay else 0.6)
                assert setup.device.used_bytes <= plan_bytes(
                    worst_case(plan, workload), twin.subgroups
                )
        assert not setup.problems()


def mutant(
    number: int | None, careless: set[str], seed: int
) -> tuple[list[str], bool, int]:
    """Run two steps of a plan with every placement, without one wait of a stream, or
    without those of the host for a stream. Return the problems, whether the wait would
    have ordered anything, and the number of waits."""
    random.seed(seed)
    twin = Twin([60, 80], [torch.bfloat16, torch.bfloat16], 20, 1)
    workload = workload_of(twin.sizes, True, False)
    with bench(twin, seed, dropped_wait=number) as setup:
        placements = [
            PLACEMENTS[number % len(PLACEMENTS)] for number in range(len(twin.sizes))
        ]
        setup.engine.set_plan(
            make(workload, placements, kept=(2, 3), seed=seed), workload
        )
        setup.cuda.careless = {setup.device.stream_name(name) for name in careless}  # type: ignore[arg-type]
        for _ in range(2):
            setup.step(0.75, 0.6)
        return list(setup.problems()), setup.is_missed, setup.cuda.waits


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_order__a_wait_that_is_left_out_is_found(seed: int) -> None:
    problems, _, waits = mutant(None, set(), seed)
    assert not problems
    count = 0
    for number in range(waits // 2):
        problems, is_missed, _ = mutant(number, set(), seed)
        assert problems or not is_missed, number
        count += bool(problems)
    assert count > 2


@pytest.mark.parametrize("stream", ["h2d", "d2h", "gpu"])
def test_order__a_host_that_does_not_wait_is_found(stream: str) -> None:
    # In some runs another wait of the host implies it.
    assert any(mutant(None, {stream}, seed)[0] for seed in range(20))
