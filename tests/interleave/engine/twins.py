"""Parameters that are updated both by plans and by the reference, and hardware with
random timing."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from ebbtide.interleave.engine.devices.device import Direction, Mark, Stream
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice, EmulatedMark
from ebbtide.interleave.engine.forks import WorkQueue
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import ADAMW, Hyper
from ebbtide.interleave.engine.rules.rule import Scalars, UpdateRule
from ebbtide.interleave.engine.runtime.arena import block_sizes, worst_case
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import Executor
from ebbtide.interleave.engine.runtime.layout import ParamSegment, divide
from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.engine.runtime.update import Update
from ebbtide.interleave.model.plan import (
    BACKWARD,
    FORWARD,
    OTHER,
    STEP,
    UPDATE,
    Op,
    Plan,
)
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from tests.interleave.engine.jobs import ReferenceAdamW
from tests.interleave.engine.states import DTYPES, bits
from tests.interleave.strategies import spread

_POINTS = (OTHER, FORWARD, BACKWARD, BACKWARD + 0.4, BACKWARD + 0.8, UPDATE, STEP)


class Twin:
    """Two copies of some parameters and their gradients. Parameters may have no
    gradient in a step."""

    def __init__(
        self,
        lengths: list[int],
        dtypes: list[torch.dtype],
        subgroup_params: int,
        seed: int,
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.params = [
            torch.randn(length, generator=self._generator).to(dtype)
            for length, dtype in zip(lengths, dtypes, strict=True)
        ]
        self.subgroups = divide(self.params, subgroup_params)
        self.sizes = [subgroup.params for subgroup in self.subgroups]
        self.reference = ReferenceAdamW(
            [param.clone() for param in self.params], Hyper(lr=0.01, weight_decay=0.1)
        )

    def update(self, scale: float = 1.0, streamed: bool = False) -> Update:
        """Return the next update. The reference does the step at once."""
        update = Update(values=self.params, streamed=streamed)
        for index, param in enumerate(self.reference.params):
            param.grad = None
            scalars = None
            if torch.rand((), generator=self._generator) < 0.85:
                param.grad = torch.randn(len(param), generator=self._generator).to(
                    param.dtype
                )
                scalars = self.reference.hyper.scalars(
                    self.reference.steps[index] + 1, scale
                )
            update.gradients.append(None if param.grad is None else param.grad.clone())
            update.scalars.append(scalars)
        self.reference.step(scale)
        return update

    def step(
        self, engine: Engine, scale: float = 1.0, offloaded_share: float = 0.0
    ) -> Schedule:
        """Run a step of an engine; a share of the gradients is offloaded before the
        step, in any order."""
        update = self.update(scale)
        gradients = {
            index: gradient
            for index, gradient in enumerate(update.gradients)
            if gradient is not None
        }
        for index in torch.randperm(
            len(self.params), generator=self._generator
        ).tolist():
            if (
                index in gradients
                and engine.is_running
                and torch.rand((), generator=self._generator) < offloaded_share
            ):
                engine.offload_gradient(index, gradients.pop(index))
                engine.report_progress(torch.rand((), generator=self._generator).item())
        engine.submit_gradients(gradients)
        return engine.step(update.values, update.scalars)

    def begin(self, store: Store) -> None:
        """Write the initial state to a store."""
        for number in range(len(self.subgroups)):
            store.states.write(number, self._state(number))

    def check(self, store: Store | None = None) -> None:
        """Check that the parameters, and the state if a store is given, have the bits
        of the reference."""
        for param, expected in zip(self.params, self.reference.params, strict=True):
            assert torch.equal(bits(param), bits(expected))
        for number in range(len(self.subgroups)) if store is not None else ():
            assert store is not None
            assert torch.equal(
                bits(store.states.read(number)), bits(self._state(number))
            )

    def _state(self, number: int) -> torch.Tensor:
        def part(segment: ParamSegment) -> torch.Tensor:
            return self.reference.state[segment.param][:, segment.begin : segment.end]

        return torch.cat(
            [part(segment) for segment in self.subgroups[number].segments], 1
        )


@st.composite
def twins(draw: st.DrawFn, mixed: bool = True) -> Twin:
    """Draw twins; with `mixed`, parameters may have different dtypes."""
    lengths = draw(st.lists(spread(1, 300).map(round), min_size=1, max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    other = draw(st.sampled_from(DTYPES)) if mixed else dtype
    dtypes = [draw(st.sampled_from([dtype, other])) for _ in lengths]
    # From many subgroups per parameter to many parameters per subgroup.
    subgroup = max(round(draw(spread(20, 400))), sum(lengths) // 8)
    return Twin(lengths, dtypes, subgroup, draw(st.integers(0, 2**32)))


class Jitter:
    """Sleeps for a random time at each call: mostly short, now and then long."""

    def __init__(self, seed: int, longest_s: float = 5e-4) -> None:
        self._random = random.Random(seed)
        self._longest_s = longest_s

    def __call__(self) -> None:
        time.sleep(self._longest_s * self._random.random() ** 4)

    def around(self, perform: Callable[[Op], None]) -> Callable[[Op], None]:
        def wrapped(op: Op) -> None:
            self()
            perform(op)
            self()

        return wrapped


class JitteryDevice(EmulatedDevice):
    """A device with random delays, and marks of the job that are passed late, as those
    of a job on a GPU are."""

    def __init__(self, jitter: Jitter, capacity_bytes: float | None = None) -> None:
        super().__init__(capacity_bytes)
        self._jitter = jitter
        self._job = WorkQueue("job")

    def record(self, stream: Stream) -> Mark:
        if stream != "job":
            return super().record(stream)
        mark = EmulatedMark()
        self._job.put(self._jitter)
        self._job.put(mark.set)
        return mark

    def close(self) -> None:
        self._job.close()
        super().close()

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for pair in pairs:
            self.submit(direction, self._jitter)
            super().copy(direction, [pair])
        self.submit(direction, self._jitter)

    def update(self, updates: Sequence[TensorUpdate]) -> None:
        for update in updates:
            self.submit("gpu", self._jitter)
            super().update([update])
        self.submit("gpu", self._jitter)


class WatchedKernel(CpuKernel):
    """Updates on the CPU, on one thread, that tests watch.

    Args:
        before: Called before an update with the tensors that it reads, and those that
            it writes.
        after: Called after an update.
    """

    def __init__(
        self,
        before: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(1)
        self._before = before
        self._after = after

    def update_ranges(
        self,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        ranges: Iterable[tuple[int, int, Scalars]],
        share: float = 1.0,
        rule: UpdateRule = ADAMW,
    ) -> None:
        self._before([grad], [*state, *([] if out is None else [out])])
        super().update_ranges(grad, state, out, ranges, share, rule)
        self._after()


class JitteryKernel(WatchedKernel):
    def __init__(self, jitter: Jitter) -> None:
        super().__init__(lambda reads, writes: jitter(), jitter)


def one_step(
    executor: Executor, plan: Plan, pause: Callable[[], None] = lambda: None
) -> PlanRun:
    """Run an iteration: begin, advance through its points, and finish."""
    executor.begin(plan)
    for point in _POINTS:
        pause()
        executor.advance_to(point)
    return executor.finish()


def place(store: Store, plan: Plan, workload: Workload) -> None:
    """Prepare a store for a plan."""
    store.apply_placement(
        plan, block_sizes(worst_case(plan, workload), store.subgroups)
    )


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Check that every thread that starts in the block ends in it."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@contextmanager
def hasty_switches() -> Iterator[None]:
    """Switch threads after some microseconds instead of milliseconds."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(2e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
