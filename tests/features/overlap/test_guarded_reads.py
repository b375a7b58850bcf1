"""Calls of an optimizer from other threads, and the end of a process, while updates
have not ended."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.conftest import run_process
from tests.features.overlap.test_late_updates import late_optimizer
from tests.interleave.engine.training import (
    MACHINE,
    Job,
    ReferenceOptimizer,
    throttle_cpu,
)
from tests.interleave.engine.twins import no_thread_left

_ROWS = ("master", "exp_avg", "exp_avg_sq")


class _Recorded:
    """The states and parameters of the reference after each step."""

    def __init__(self, steps: int) -> None:
        job = Job()
        optimizer = ReferenceOptimizer(job.net.parameters())
        self.states: list[dict[int, list[torch.Tensor]]] = [{}]
        self.params: list[list[torch.Tensor]] = [job.outcome().params]
        for _ in range(steps):
            job.step(optimizer)
            entries = [optimizer.state.get(param) for param in job.net.parameters()]
            self.states.append(
                {
                    index: [row.clone() for row in entry["rows"]]
                    for index, entry in enumerate(entries)
                    if entry
                }
            )
            self.params.append(job.outcome().params)

    def step_of(self, state_dict: dict[str, Any]) -> int:
        """Return the step after which a state dict is that of the reference; -1 if
        there is none."""
        entries = state_dict["state"]
        step = int(max((entry["step"] for entry in entries.values()), default=0))
        expected = self.states[step]
        is_equal = entries.keys() == expected.keys() and all(
            entries[index]["step"] == step
            and torch.equal(entries[index][name].reshape(-1), row)
            for index, rows in expected.items()
            for name, row in zip(_ROWS, rows, strict=True)
        )
        return step if is_equal else -1


def _train_beside(
    steps: int, overlap: str, mode: str, read: Callable[[Job, Any], object]
) -> list[Any]:
    """Train, while another thread reads as often as there are steps, and return what it
    has read."""
    job, results, errors = Job(), [], []
    options: dict[str, Any] = {"overlap": overlap, "machine": MACHINE}
    with late_optimizer(job, "interleaved:2", mode, **options) as optimizer:
        # Parameters on the CPU are taken by the first step.
        _ = optimizer.plan
        is_over, has_begun = threading.Event(), threading.Event()

        def read_all() -> None:
            try:
                while not (is_over.is_set() and len(results) >= steps):
                    has_begun.set()
                    results.append(read(job, optimizer))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=read_all)
        thread.start()
        try:
            for _ in range(steps):
                job.step(optimizer)
                # At least one read begins after each step.
                has_begun.clear()
                assert has_begun.wait(60)
        finally:
            is_over.set()
            thread.join(60)
        assert not thread.is_alive()
        assert errors == []
        optimizer.synchronize()
        assert all(map(torch.equal, job.outcome().params, _Recorded(steps).params[-1]))
    return results


CASES = [
    ("forward", "streamed", 20),
    ("none", "kept", 20),
    *(
        pytest.param(overlap, mode, 200, marks=pytest.mark.slow)
        for overlap, mode in (
            ("none", "kept"),
            ("none", "streamed"),
            ("forward", "kept"),
            ("forward", "streamed"),
            ("both", "streamed"),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "mode", "steps"), CASES)
def test_state_dict__from_another_thread_is_that_of_one_step(
    overlap: str, mode: str, steps: int
) -> None:
    state_dicts = _train_beside(
        steps, overlap, mode, lambda job, optimizer: optimizer.state_dict()
    )
    recorded = _Recorded(steps)
    steps_read = [recorded.step_of(state_dict) for state_dict in state_dicts]
    assert -1 not in steps_read
    assert steps_read == sorted(steps_read)
    assert len(set(steps_read)) > steps / 4


def test_hold_steps__gives_another_thread_parameters_and_state_of_the_same_step() -> (
    None
):
    def read(job: Job, optimizer: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
        with optimizer.hold_steps():
            return [
                value.clone() for value in job.net.state_dict(keep_vars=True).values()
            ], optimizer.state_dict()

    steps = 20
    recorded = _Recorded(steps)
    index = [
        list(Job().net.state_dict()).index(name)
        for name, _ in Job().net.named_parameters()
    ]
    for values, state_dict in _train_beside(steps, "forward", "kept", read):
        step = recorded.step_of(state_dict)
        assert step >= 0
        assert all(
            torch.equal(values[at], param)
            for at, param in zip(index, recorded.params[step], strict=True)
        )


def test_step__lets_another_thread_call_in_its_closure() -> None:
    job = Job()
    with late_optimizer(job, "pipelined", "kept") as optimizer:
        job.step(optimizer)

        def closure() -> torch.Tensor:
            # Hooks of a backward on a GPU are called on threads of autograd.
            thread = threading.Thread(target=optimizer.state_dict)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
            loss = job.loss()
            loss.backward()
            return loss

        optimizer.step(closure)


def test_state_dict__leaves_streamed_gradients_alone_in_the_middle_of_a_backward() -> (
    None
):
    job, same = Job(), Job()
    expected = ReferenceOptimizer(same.net.parameters())
    with late_optimizer(job, "pipelined", "streamed") as optimizer:
        for _ in range(2):
            job.step(optimizer)
            same.step(expected)
        offloaded = []
        state_dicts = []

        def save(*_: Any) -> None:
            offloaded.append(len(optimizer._runner.engine.update.offloaded))
            state_dicts.append(optimizer.state_dict())
            assert len(optimizer._runner.engine.update.offloaded) == offloaded[-1]

        handle = job.net.late.register_full_backward_hook(save)
        job.step(optimizer)
        handle.remove()
        same.step(expected)
        optimizer.synchronize()
        assert offloaded[0] > 0
        assert _Recorded(2).step_of(state_dicts[0]) == 2
        assert job.outcome() == same.outcome()


EXIT = """
import atexit, threading, time
# Called after all others.
atexit.register(lambda: print("updates", len(updates) == per_step))
import torch
from ebbtide.interleave import InterleavedAdamW

net = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
options = {"policy": "pipelined", "overlap": "forward", "model": net, "subgroup_params": 500}
optimizer = InterleavedAdamW(net.parameters(), **options)
entered, updates = threading.Event(), []
update = optimizer._runner.kernel.update_ranges
for step in range(2):
    net(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    net.zero_grad()
optimizer.synchronize()

def update_slowly(*arguments):
    entered.set()
    time.sleep(0.05)
    update(*arguments)
    updates.append(1)

optimizer._runner.kernel.update_ranges = update_slowly
per_step = sum(op.kind == "update" for op in optimizer.plan.ops)
net(torch.ones(2, 40)).sum().backward()
optimizer.step()
assert entered.wait(30)
print("late", optimizer._runner.is_late)
"""


def test_del__finishes_updates_that_have_not_ended_and_ends_all_threads() -> None:
    job, same = Job(), Job()
    expected = ReferenceOptimizer(same.net.parameters())
    with no_thread_left():
        optimizer = InterleavedAdamW(
            job.net.parameters(),
            policy="pipelined",
            overlap="forward",
            model=job.net,
            subgroup_params=500,
        )
        throttle_cpu(optimizer, lambda: 1e5)
        job.step(optimizer)
        same.step(expected)
        assert optimizer._runner.is_late
        del optimizer
        gc.collect()
        job.loss()
        same.loss()
        for thread in threading.enumerate():
            if thread.name == "ebbtide-finish":
                thread.join(60)
        gc.collect()
    assert job.outcome() == same.outcome()


@pytest.mark.slow
def test_process__finishes_updates_at_its_end() -> None:
    result = run_process([sys.executable, "-c", EXIT], timeout_s=60)
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        "late True\nupdates True\n",
        "",
    )


def test_fork__gives_the_child_the_updated_parameters_and_nothing_to_wait_for() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = InterleavedAdamW(
        model.parameters(),
        policy="pipelined",
        overlap="forward",
        model=model,
        threads=1,
        subgroup_params=4000,
        device=EmulatedDevice(None, 2e5, 2e5),
    )
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    assert optimizer._calls.is_active
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(
        target=lambda: queue.put(
            [float(param.detach().sum()) for param in model.parameters()]
        )
    )
    child.start()
    values = queue.get()
    child.join(30)
    assert child.exitcode == 0
    assert values == [float(param.detach().sum()) for param in model.parameters()]
    optimizer.close()
