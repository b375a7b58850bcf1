"""Steps that are interrupted or raise, at any line: each is done as a whole or not at
all, and no gradient of it is left."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.runtime import executor
from ebbtide.interleave.engine.runtime.executor import deferred_interrupts
from tests.conftest import examples
from tests.interleave.engine.training import MACHINE

# (policy, gradients, overlap)
CONFIGS = [
    ("zero-offload", "kept", "none"),
    ("zero-offload", "streamed", "none"),
    ("interleaved:2", "kept", "none"),
    ("interleaved:2", "streamed", "none"),
    ("gpu-only", "kept", "none"),
    ("pipelined", "streamed", "both"),
    ("pipelined", "kept", "forward"),
]
_PACKAGE = str(Path(executor.__file__).parents[2])
_STEPS, _FAULTY = 5, 2


class Fault(Exception):
    """The error that a step raises."""


class LineFault:
    """Calls a function when the training thread comes to a line of the package, counted
    from the first.

    Args:
        number: The number of the line; None to count them all.
        strike: The function, which may raise.
        until: Name of a function of the engine at which lines end.
    """

    def __init__(
        self, number: int | None, strike: Callable[[], None], until: str | None = None
    ) -> None:
        self.count = 0
        self._number = number
        self._strike = strike
        self._until = until
        self._is_over = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        # A tool that measures coverage has one, too.
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        is_own = frame.f_code.co_filename.startswith(_PACKAGE)
        self._is_over = self._is_over or (
            is_own and frame.f_code.co_qualname == self._until
        )
        if not is_own or self._is_over:
            return None
        # Where a trace function raises as a `with` ends, its lock stays acquired:
        # nothing of the job raises there.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith("with self._"):
            self.count += 1
            if self.count == self._number:
                self._is_over = True
                self._strike()
        return self._trace


class InterruptedJob:
    """A job one of whose steps is disturbed, and goes on.

    Args:
        config: One of CONFIGS.
        disturb: Makes the context of the disturbed step; None: that iteration is left
            out.
    """

    def __init__(
        self, config: tuple[str, str, str], disturb: Callable[[], Any] | None
    ) -> None:
        policy, gradients, overlap = config
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
        ).bfloat16()
        device = EmulatedDevice(None, 2e5, 2e5)
        self.optimizer = InterleavedAdamW(
            self.model.parameters(),
            lr=0.05,
            policy=policy,
            gradients=gradients,  # type: ignore[arg-type]
            overlap=overlap,  # type: ignore[arg-type]
            model=None if overlap == "none" else self.model,
            subgroup_params=20,
            threads=1,
            machine=MACHINE,
            max_grad_norm=0.5,
            device=device,
        )
        self.error: BaseException | None = None
        self.is_lost = False
        try:
            for step in range(_STEPS):
                if step != _FAULTY or disturb is not None:
                    self._backward(step)
                    self._step(disturb if step == _FAULTY else None)
            self.optimizer.synchronize()
            self.steps = {
                int(entry["step"])
                for entry in self.optimizer.state_dict()["state"].values()
            }
        except EngineError as error:
            self.is_lost = "closed, or its state is lost" in str(error)
            if not self.is_lost:
                raise
        finally:
            self.optimizer.close()
            device.close()

    def _backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        # Gradients of the disturbed step differ from those of all others.
        inputs = torch.full((2, 6), 3.0 if step == _FAULTY else 1.0 + step).bfloat16()
        self.model(inputs).float().square().sum().backward()

    def _step(self, disturb: Callable[[], Any] | None) -> None:
        if disturb is None:
            self.optimizer.step()
            return
        try:
            with disturb():
                self.optimizer.step()
        except (KeyboardInterrupt, Fault, EngineError) as error:
            self.error = error

    @property
    def result(self) -> tuple[list[float], set[int]]:
        """The parameters and the step counts at the end."""
        values = torch.cat(
            [param.detach().float().reshape(-1) for param in self.model.parameters()]
        )
        return values.tolist(), self.steps


def results(
    config: tuple[str, str, str],
    cache: dict[Any, Any] = {},  # noqa: B006
) -> tuple[Any, Any, int]:
    """Return the results of the job without the disturbed step and with it undisturbed,
    and the lines of that step."""
    if config not in cache:
        lines = LineFault(None, lambda: None)
        done = InterruptedJob(config, lines.armed)
        cache[config] = InterruptedJob(config, None).result, done.result, lines.count
    left_out, whole, count = cache[config]
    assert left_out != whole
    return left_out, whole, count


@settings(max_examples=examples(300, by_default=15))
@given(config=st.sampled_from(CONFIGS), place=st.floats(0, 1))
def test_step__is_done_or_not_done_when_ctrl_c_comes_at_any_line(
    config: tuple[str, str, str], place: float
) -> None:
    left_out, whole, count = results(config)
    number = 1 + round(place * (count - 1))
    fault = LineFault(number, lambda: signal.raise_signal(signal.SIGINT))
    job = InterruptedJob(config, fault.armed)
    assert not job.is_lost
    assert job.result in (left_out, whole)
    # The number of lines depends a little on timing.
    assert fault.count < number or isinstance(job.error, KeyboardInterrupt)


@settings(max_examples=examples(300, by_default=15))
@given(config=st.sampled_from(CONFIGS), place=st.floats(0, 1))
def test_step__leaves_no_gradient_of_a_step_that_raises_at_any_line(
    config: tuple[str, str, str], place: float
) -> None:
    """Until the engine begins with updates: what raises later is a failed operation,
    see test_faults.py."""
    left_out, _, _ = results(config)
    lines = LineFault(None, lambda: None, until="Engine.step")
    InterruptedJob(config, lines.armed)
    fault = LineFault(
        1 + round(place * (lines.count - 1)), _raise_fault, until="Engine.step"
    )
    job = InterruptedJob(config, fault.armed)
    assume(job.error is not None)
    assert job.is_lost or job.result == left_out


def _raise_fault() -> None:
    raise Fault("at this line")


# Each by default, and one interval of three with each configuration.
@pytest.mark.parametrize(
    ("config", "interval_s"),
    [
        pytest.param(
            config, interval_s, marks=() if number % 3 == place else pytest.mark.slow
        )
        for number, config in enumerate(CONFIGS)
        for place, interval_s in enumerate((0.0, 0.001, 0.01))
    ],
)
def test_step__is_whole_after_any_number_of_interrupts(
    config: tuple[str, str, str], interval_s: float
) -> None:
    """Ctrl-C again and again, at any time during the step."""
    left_out, whole, _ = results(config)
    arrived = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise KeyboardInterrupt

    @contextmanager
    def interrupted() -> Iterator[None]:
        over = threading.Event()

        def send() -> None:
            while not over.wait(interval_s):
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, on_interrupt)
        sender = threading.Thread(target=send)
        try:
            try:
                sender.start()
                yield
            finally:
                signal.signal(signal.SIGINT, lambda number, frame: None)
                over.set()
                sender.join()
        finally:
            signal.signal(signal.SIGINT, before)

    job = InterruptedJob(config, interrupted)
    assert not job.is_lost
    assert job.result in (left_out, whole)


@pytest.mark.parametrize("config", CONFIGS)
def test_step__is_discarded_by_the_next_one_if_interrupts_leave_no_time(
    config: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, between the first one and the discarding."""
    left_out, _, _ = results(config)

    @contextmanager
    def twice_interrupted() -> Iterator[None]:
        offloaded = job_of[0]._offloaded
        with monkeypatch.context() as patch:
            patch.setattr(offloaded.norm, "scale_factor", _interrupt)
            patch.setattr(offloaded, "discard_step", _interrupt)
            yield

    job_of: list[InterleavedAdamW] = []
    own_step = InterruptedJob._step

    def step(job: InterruptedJob, disturb: Any) -> None:
        job_of[:] = [job.optimizer]
        own_step(job, disturb)

    monkeypatch.setattr(InterruptedJob, "_step", step)
    assert InterruptedJob(config, twice_interrupted).result == left_out


def _interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_deferred_interrupts__runs_handlers_at_its_end_and_puts_them_back() -> None:
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        own = signal.getsignal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            _interrupt_itself(calls)
        assert calls == [signal.SIGUSR1] * 2
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


@deferred_interrupts()
@deferred_interrupts()
def _interrupt_itself(calls: list[int]) -> None:
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1):
        signal.raise_signal(number)
    assert not calls


def test_step__can_be_interrupted_while_it_waits_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum of the norms over ranks may never come."""
    # Before steps are disturbed: other tests may not have computed them.
    without_the_step = results(CONFIGS[0])[0]
    job_step = InterruptedJob._step

    @contextmanager
    def waiting() -> Iterator[None]:
        is_over = threading.Event()

        def interrupt() -> None:
            # A KeyboardInterrupt in a callback of the garbage collector is lost: it
            # comes again.
            delay_s = 0.05
            while not is_over.wait(delay_s):
                os.kill(os.getpid(), signal.SIGINT)
                delay_s = 5.0

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def step(job: InterruptedJob, disturb: Any) -> None:
        with monkeypatch.context() as patch:
            if disturb is not None:
                patch.setattr(
                    job.optimizer._offloaded.norm,
                    "scale_factor",
                    lambda *arguments: time.sleep(60),
                )
            job_step(job, disturb)

    monkeypatch.setattr(InterruptedJob, "_step", step)
    job = InterruptedJob(CONFIGS[0], waiting)
    assert isinstance(job.error, KeyboardInterrupt)
    assert job.result == without_the_step


@pytest.mark.parametrize("gradients", ["kept", "streamed"])
def test_step__drops_the_gradients_of_a_step_that_raises_at_once(
    gradients: str,
) -> None:
    """The next backward streams its gradients as ever, and no memory is held until
    then."""
    model = nn.Linear(4, 4)
    optimizer = InterleavedAdamW(
        model.parameters(), policy="zero-offload", gradients=gradients
    )  # type: ignore[arg-type]

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()

    for _ in range(2):
        backward()
        optimizer.step()
    backward()
    engine = optimizer._runner.engine
    assert len(engine.update.offloaded) == (2 if gradients == "streamed" else 0)
    dropped = [weakref.ref(param.grad) for param in model.parameters()]
    optimizer._offloaded.norm.scale_factor = _interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    del optimizer._offloaded.norm.scale_factor
    optimizer.zero_grad()
    assert [reference() for reference in dropped] == [None, None]
    backward()
    assert len(engine.update.offloaded) == (2 if gradients == "streamed" else 0)
    optimizer.close()
