"""Optimizers that call a closure, once or several times per step, and closures that
fail."""

from __future__ import annotations

import pytest

from ebbtide.profiler.trace import Trace
from tests.conftest import phases_of
from tests.profiler.agent.jobs import STEPS

CLOSURE = """
def closure():
    optimizer.zero_grad()
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss
"""

# name: (the job, the phases of every iteration)
JOBS: dict[str, tuple[str, list[str]]] = {
    "a closure as keyword": (
        CLOSURE
        + "for _ in range(STEPS): assert optimizer.step(closure=closure) is not None",
        ["forward backward update"] * STEPS,
    ),
    "a closure by position, with a scheduler and hooks": (
        CLOSURE
        + """
optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
optimizer.register_step_post_hook(lambda optimizer, args, kwargs: None)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
for _ in range(STEPS):
    optimizer.step(closure)
    schedule.step()
""",
        ["forward backward update"] * STEPS,
    ),
    "a closure that accumulates": (
        """
def closure():
    for _ in range(3):
        x, y = batch()
        F.mse_loss(model(x), y).backward()
for _ in range(STEPS):
    optimizer.step(closure)
    optimizer.zero_grad()
""",
        ["forward backward forward backward forward backward update"] * STEPS,
    ),
    "a GradScaler that is disabled": (
        CLOSURE
        + """
scaler = torch.amp.GradScaler("cpu", enabled=False)
for _ in range(STEPS):
    scaler.step(optimizer, closure)
    scaler.update()
""",
        ["forward backward update"] * STEPS,
    ),
    "a closure that does nothing": (
        """
for _ in range(STEPS):
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    optimizer.step(lambda: None)
    optimizer.zero_grad()
""",
        ["forward backward update"] * STEPS,
    ),
    "an optimizer that takes a closure and calls none": (
        """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()
optimizer = Own(model.parameters(), lr=1e-2)
for _ in range(STEPS):
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    optimizer.step(lambda: 1 / 0)
    optimizer.zero_grad()
""",
        ["forward backward update"] * STEPS,
    ),
    "a wrapper that passes the closure on": (
        """
class Wrapper(torch.optim.SGD):
    def step(self, closure=None):
        assert closure.mark == 7
        return super().step(closure)
optimizer = Wrapper(model.parameters(), lr=1e-2)
class Nothing:
    mark = 7
    def __call__(self):
        pass
for _ in range(3):
    optimizer.step(Nothing())  # the first calls of torch's hooks take long
class Closure:
    mark = 7
    def __call__(self):
        optimizer.zero_grad()
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss
for _ in range(STEPS):
    optimizer.step(Closure())
""",
        ["forward backward update"] * STEPS,
    ),
    "a closure that steps another optimizer by a closure": (
        """
second = torch.optim.SGD(mlp().parameters(), lr=1e-2)
def inner():
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss
def outer():
    second.step(inner)
    return inner()
for _ in range(STEPS):
    optimizer.step(outer)
    optimizer.zero_grad()
""",
        ["forward backward update forward backward update"] * STEPS,
    ),
    "several calls of a closure": (
        CLOSURE
        + """
class Twice(torch.optim.SGD):
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        closure()
        closure()
        return super().step()
optimizer = Twice(model.parameters(), lr=1e-2)
for _ in range(STEPS):
    optimizer.step(closure)
""",
        ["update"] * STEPS,
    ),
    "a closure that raises": (
        """
calls = 0
def closure():
    global calls
    calls += 1
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    if calls % 2:
        raise MemoryError("no room")
    loss.backward()
    return loss
for _ in range(STEPS):
    try:
        optimizer.step(closure)
    except MemoryError:
        optimizer.step(closure)
    optimizer.zero_grad()
""",
        ["forward forward backward update"] * STEPS,
    ),
    "a closure in an update that is marked by hand": (
        CLOSURE
        + """
from ebbtide.profiler import Tracer
with Tracer("unused.ebb") as tracer:
    for _ in range(STEPS):
        with tracer.phase("update"):
            optimizer.step(closure)
""",
        ["update"] * STEPS,
    ),
}


SLOW_CALLS = (
    CLOSURE
    + """
import time
class Slow(torch.optim.SGD):
    def step(self, closure):
        time.sleep(0.02)
        torch.enable_grad()(closure)()
        time.sleep(0.02)
        torch.enable_grad()(closure)()
        time.sleep(0.02)
optimizer = Slow(model.parameters(), lr=1e-2)
for _ in range(STEPS):
    optimizer.step(closure)
"""
)

RESULTS = """
def closure():
    return torch.tensor(5.0)
assert optimizer.step(closure) == 5.0
try:
    optimizer.step(lambda: 1 / 0)
except ZeroDivisionError:
    pass
try:
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch()
    scaler.scale(F.mse_loss(model(x), y)).backward()
    scaler.step(optimizer, closure=closure)
except RuntimeError as error:
    assert "Closure use is not currently supported" in str(error)
for _ in range(3):
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


# Recorded by the fixture `traced`.
CLOSURES = {name: job for name, (job, _) in JOBS.items()} | {
    "slow calls": SLOW_CALLS,
    "results": RESULTS,
}


@pytest.mark.parametrize("name", JOBS)
def test_tracer__records_the_phases_of_closures(
    name: str, traced: dict[str, Trace]
) -> None:
    assert phases_of(traced[name]) == [words.split() for words in JOBS[name][1]]
    assert all(phases_are_apart(traced[name]))


def phases_are_apart(trace: Trace) -> list[bool]:
    """Whether each phase begins after the end of the one before."""
    phases = trace.phases(0)
    return list(
        phases["start_ns"].iloc[1:].to_numpy() >= phases["end_ns"].iloc[:-1].to_numpy()
    )


def test_tracer__notes_a_closure_that_is_called_several_times(
    traced: dict[str, Trace],
) -> None:
    noted = {
        name
        for name in CLOSURES
        if any("closure several times" in note for note in traced[name].notes)
    }
    assert noted == {"several calls of a closure", "slow calls"}


def test_tracer__spans_the_whole_step_of_several_calls(
    traced: dict[str, Trace],
) -> None:
    phases = traced["slow calls"].phases(0)
    assert ((phases["end_ns"] - phases["start_ns"]) >= 60e6).all()


def test_step__returns_and_raises_as_without_a_recorder(
    traced: dict[str, Trace],
) -> None:
    update = ["forward", "backward", "update"]
    assert phases_of(traced["results"]) == [update] * 4
    assert not traced["results"].notes
