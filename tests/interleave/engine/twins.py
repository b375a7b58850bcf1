"""Parameters that are updated by plans and, beside them, by the reference; and hardware of unforeseeable timing."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Hyper, Scalars
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import Executor, Run
from ebbtide.interleave.engine.runtime.layout import Piece, divide
from ebbtide.interleave.engine.runtime.store import Inputs, Store
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, OTHER, STEP, UPDATE, Op, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from tests.interleave.engine.jobs import ReferenceAdamW
from tests.interleave.engine.states import DTYPES, bits
from tests.interleave.strategies import spread

_POINTS = (OTHER, FORWARD, BACKWARD, BACKWARD + 0.4, BACKWARD + 0.8, UPDATE, STEP)


class Twin:
    """Some parameters and their gradients, twice. Parameters may have no gradient in a step."""

    def __init__(self, lengths: list[int], dtypes: list[torch.dtype], subgroup_params: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.params = [
            torch.randn(length, generator=self._generator).to(dtype)
            for length, dtype in zip(lengths, dtypes, strict=True)
        ]
        self.subgroups = divide(self.params, subgroup_params)
        self.sizes = [subgroup.params for subgroup in self.subgroups]
        self.reference = ReferenceAdamW([param.clone() for param in self.params], Hyper(lr=0.01, weight_decay=0.1))

    def inputs(self, scale: float = 1.0, streams: bool = False) -> Inputs:
        """Of the next step. The reference makes it at once."""
        found = Inputs(self.params, streams=streams)
        for index, param in enumerate(self.reference.params):
            param.grad = None
            scalars = None
            if torch.rand((), generator=self._generator) < 0.85:
                param.grad = torch.randn(len(param), generator=self._generator).to(param.dtype)
                scalars = self.reference.hyper.scalars(self.reference.steps[index] + 1, scale)
            found.gradients.append(None if param.grad is None else param.grad.clone())
            found.scalars.append(scalars)
        self.reference.step(scale)
        return found

    def step(self, engine: Engine, scale: float = 1.0, taken: float = 0.0) -> Schedule:
        """One step by an engine. taken: the share of the gradients that it takes as they are made, in any order."""
        inputs = self.inputs(scale)
        gradients = {index: gradient for index, gradient in enumerate(inputs.gradients) if gradient is not None}
        for index in torch.randperm(len(self.params), generator=self._generator).tolist():
            if index in gradients and engine.under_way and torch.rand((), generator=self._generator) < taken:
                engine.take(index, gradients.pop(index))
                engine.reach(torch.rand((), generator=self._generator).item())
        engine.give(gradients)
        return engine.step(inputs.values, inputs.scalars)

    def begin(self, store: Store) -> None:
        """Put the state where nothing has been updated yet into a store."""
        for number in range(len(self.subgroups)):
            store.write(number, self._state(number))

    def check(self, store: Store | None = None) -> None:
        """Parameters are the reference's to the bit; where the store rests, its state too."""
        for param, expected in zip(self.params, self.reference.params, strict=True):
            assert torch.equal(bits(param), bits(expected))
        for number in range(len(self.subgroups)) if store is not None else ():
            assert store is not None
            assert torch.equal(bits(store.read(number)), bits(self._state(number)))

    def _state(self, number: int) -> torch.Tensor:
        def part(piece: Piece) -> torch.Tensor:
            return self.reference.state[piece.param][:, piece.begin : piece.end]

        return torch.cat([part(piece) for piece in self.subgroups[number].pieces], 1)


@st.composite
def twins(draw: st.DrawFn, mixed: bool = True) -> Twin:
    """mixed: parameters may be of different precision."""
    lengths = draw(st.lists(spread(1, 300).map(round), min_size=1, max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    other = draw(st.sampled_from(DTYPES)) if mixed else dtype
    dtypes = [draw(st.sampled_from([dtype, other])) for _ in lengths]
    # From many subgroups in a parameter to many parameters in a subgroup.
    subgroup = max(round(draw(spread(20, 400))), sum(lengths) // 8)
    return Twin(lengths, dtypes, subgroup, draw(st.integers(0, 2**32)))


class Jitter:
    """Sleeps for a time drawn anew at each call: most often hardly, now and then long."""

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
    def __init__(self, jitter: Jitter, capacity_bytes: float | None = None) -> None:
        super().__init__(capacity_bytes)
        self._jitter = jitter

    def copy(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for pair in pairs:
            self._jitter()
            super().copy(direction, [pair])
        self._jitter()

    def update(
        self,
        grad: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        scalars: Scalars,
    ) -> None:
        self._jitter()
        super().update(grad, master, exp_avg, exp_avg_sq, out, scalars)
        self._jitter()


class JitteryKernel(CpuKernel):
    def __init__(self, jitter: Jitter) -> None:
        super().__init__(1)
        self._jitter = jitter

    def update(
        self,
        grad: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor | None,
        scalars: Scalars,
    ) -> None:
        self._jitter()
        super().update(grad, master, exp_avg, exp_avg_sq, out, scalars)
        self._jitter()


def one_step(executor: Executor, plan: Plan, pause: Callable[[], None] = lambda: None) -> Run:
    """Begin, come to one point of the iteration after the other, and finish."""
    executor.begin(plan)
    for point in _POINTS:
        pause()
        executor.reach(point)
    return executor.finish()


def schedule_of(run: Run, workload: Workload) -> Schedule:
    """What was measured; the phases do not matter."""
    return Schedule(run.plan, workload, run.starts, run.ends, 0.0, 0.0, 0.0, max(run.ends))


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Whatever begins threads here ends them."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@contextmanager
def hasty_switches() -> Iterator[None]:
    """Threads take turns after some microseconds, not milliseconds."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(2e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
