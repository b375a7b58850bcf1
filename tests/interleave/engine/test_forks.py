"""Forked processes: a call in a child gives the result of the parent or an error, and
the parent keeps its bits."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ebbtide.interleave import InterleavedAdamW, offload_activations, stream_weights
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.forks import WorkQueue, fork_lock
from ebbtide.machines.machine import Machine, StoragePath
from tests.conftest import run_process, slow, slow_case
from tests.interleave.engine.forked import forked
from tests.interleave.engine.training import MACHINE

WIDTH = 48
# Copies of a step take some milliseconds.
RATE = 3e6


# By what is in flight, whether gradients are streamed.
STREAMED = {
    "late updates": False,
    "gradients": True,
    "speculative updates": True,
    "storage": True,
    "weights": False,
    "activations": False,
}


def machine(folder: Path) -> Machine:
    """Return a machine whose storage needs no measurement."""
    return replace(MACHINE, storage=(StoragePath(1e8, 1e8, path=str(folder)),))


class ForkingJob:
    """A job that forks with something in flight in its third iteration.

    Args:
        in_flight: What is in flight: a key of STREAMED.
        folder: For state in storage.
    """

    def __init__(self, in_flight: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.in_flight = in_flight
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.device = EmulatedDevice(None, RATE, RATE)
        self._stack = ExitStack()
        self._stack.callback(self.device.close)
        overlap = {"late updates": "forward", "speculative updates": "both"}.get(
            in_flight, "none"
        )
        options: dict[str, Any] = {}
        if in_flight == "storage":
            options = {"storage": folder, "host_memory_budget": 1.2e5}
        if in_flight == "weights":
            self._stack.enter_context(
                stream_weights(self.model, device=self.device, weights="streamed")
            )
        if in_flight == "activations":
            self._stack.enter_context(
                offload_activations(
                    self.model, device=self.device, activations="offload"
                )
            )
        self.optimizer = InterleavedAdamW(
            self.model.parameters(),
            lr=0.01,
            policy="pipelined",
            gradients="streamed" if STREAMED[in_flight] else "kept",
            overlap=overlap,  # type: ignore[arg-type]
            model=self.model if overlap != "none" else None,
            subgroup_params=1000,
            threads=1,
            machine=machine(folder),
            device=None if in_flight in ("weights", "activations") else self.device,
            **options,
        )
        self._stack.callback(self.optimizer.close)
        for _ in range(2):
            self.iterate()

    def iterate(self) -> None:
        self.forward().backward()
        self.step()

    def forward(self) -> torch.Tensor:
        self.loss = self.model(torch.ones(4, WIDTH)).square().sum()
        return self.loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin(self) -> None:
        """Put something in flight."""
        if self.in_flight == "late updates":
            self.iterate()
            assert self.optimizer._calls.is_active
        elif self.in_flight in ("weights", "activations"):
            self.forward()
        else:
            self.forward().backward()

    def end(self) -> None:
        """End the iteration that `begin` has begun."""
        if self.in_flight in ("weights", "activations"):
            self.loss.backward()
        if self.in_flight != "late updates":
            self.step()

    def backward(self) -> None:
        """Run another backward and a step."""
        self.end()
        self.iterate()

    def load_state_dict(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def fingerprint(self) -> str:
        """Return the parameters and the moments, as a text."""
        self.optimizer.synchronize()
        entries = self.optimizer.state_dict()["state"].values()
        tensors = [
            *self.model.parameters(),
            *(entry["exp_avg_sq"] for entry in entries),
        ]
        return str([tensor.detach().double().sum().item().hex() for tensor in tensors])

    def close(self) -> None:
        self._stack.close()


CALLS: dict[str, Callable[[ForkingJob], object]] = {
    "step": ForkingJob.end,
    "backward": ForkingJob.backward,
    "state_dict": ForkingJob.fingerprint,
    "load_state_dict": ForkingJob.load_state_dict,
    "synchronize": lambda job: job.optimizer.synchronize(),
    "close": ForkingJob.close,
}
# The end of a child without a call has nothing to compare.
HAS_STATE = ("step", "backward", "state_dict", "load_state_dict")


@pytest.fixture(
    params=slow(STREAMED, but=("late updates", "speculative updates", "storage"))
)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ForkingJob]:
    job = ForkingJob(request.param, tmp_path)
    yield job
    job.close()


@pytest.mark.parametrize("name", CALLS)
def test_fork__lets_a_child_call_the_optimizer_as_the_parent_does(
    job: ForkingJob, name: str
) -> None:
    call = CALLS[name]

    def in_child() -> str:
        call(job)
        return job.fingerprint() if name in HAS_STATE else "ended"

    job.begin()
    result, error = forked(in_child)
    if job.in_flight == "storage" and name in HAS_STATE:
        assert error is not None
        assert "belongs to the process that was forked" in error
        assert "\n" not in error
    else:
        assert error is None
    if name in HAS_STATE:
        # The parent has the state of before.
        assert error or result == in_child()


def test_fork__leaves_files_of_the_parent_alone_and_their_locks_to_it(
    tmp_path: Path,
) -> None:
    job = ForkingJob("storage", tmp_path)
    (path,) = tmp_path.iterdir()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        job.close()
        os.read(reader, 1)
        os._exit(0)
    job.iterate()
    commit = job.optimizer.commit()
    job.close()
    assert path.exists()
    other = ForkingJob("late updates", tmp_path)
    stored = InterleavedAdamW(
        other.model.parameters(),
        policy="pipelined",
        subgroup_params=1000,
        machine=machine(tmp_path),
        storage=tmp_path,
    )
    # The child still lives.
    stored.load_state_dict(commit)
    stored.close()
    other.close()
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "in_flight", slow(["late updates", "gradients", "storage"], but=["gradients"])
)
def test_fork__on_another_thread_ends_with_a_result_or_an_error(
    in_flight: str, tmp_path: Path
) -> None:
    """The thread that trains goes on meanwhile."""
    job = ForkingJob(in_flight, tmp_path)
    is_over = threading.Event()
    answers = []

    def fork() -> None:
        while not is_over.is_set():
            answers.append(forked(job.fingerprint))

    thread = threading.Thread(target=fork)
    thread.start()
    try:
        while len(answers) < 5 and thread.is_alive():
            job.iterate()
    finally:
        is_over.set()
        thread.join()
    assert len(answers) >= 5
    for result, error in answers:
        assert result or error
    job.close()


def test_fork__while_another_thread_commits_is_refused_in_the_child(
    tmp_path: Path,
) -> None:
    job = ForkingJob("late updates", tmp_path)
    holds, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with job.optimizer.hold_steps():
            holds.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(30)
    try:
        _, error = forked(job.fingerprint)
    finally:
        is_over.set()
        thread.join()
    assert error is not None
    assert "another thread was in a call of it" in error
    assert job.fingerprint()
    job.close()


@pytest.mark.parametrize(
    "in_flight",
    slow(["late updates", "gradients", "speculative updates"], but=["late updates"]),
)
def test_fork__in_a_signal_handler_within_a_step_is_whole(
    in_flight: str, tmp_path: Path
) -> None:
    job = ForkingJob(in_flight, tmp_path)
    answers = []

    def on_signal(*_: Any) -> None:
        answers.append(forked(job.fingerprint))

    # Not that of an alarm, by which pytest ends a test that hangs.
    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        for number, delay_s in enumerate((0.001, 0.004, 0.01), 1):
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            job.iterate()
            timer.join()
            while len(answers) < number:
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert all(result for result, _ in answers)
    job.close()


def test_fork__lets_workers_of_data_loaders_start_at_every_epoch(
    tmp_path: Path,
) -> None:
    job = ForkingJob("late updates", tmp_path)
    data = TensorDataset(torch.ones(8, WIDTH))
    for _ in range(2):
        for (batch,) in DataLoader(
            data, batch_size=4, num_workers=2, multiprocessing_context="fork"
        ):
            job.model(batch).square().sum().backward()
            job.step()
    job.close()


def test_fork__gives_processes_of_multiprocessing_a_state(tmp_path: Path) -> None:
    job = ForkingJob("gradients", tmp_path)
    job.begin()
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(target=lambda: queue.put(job.fingerprint()))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert queue.get() == job.fingerprint()
    job.close()


EXIT = """
import os, sys
from pathlib import Path
from tests.interleave.engine.test_forks import STREAMED, ForkingJob

jobs = []
for number, in_flight in enumerate(STREAMED):
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    jobs.append(ForkingJob(in_flight, folder))
    jobs[-1].begin()
child = os.fork()
if not child:
    # Another step of each, but of those in storage.
    for job in jobs:
        if job.in_flight != "storage":
            job.backward()
    sys.exit(0)
print("child", os.waitpid(child, 0)[1], flush=True)
for job in jobs:
    job.end()
print("files", len(list(Path(sys.argv[1]).glob("*/*.state"))))
"""


@pytest.mark.slow
def test_fork__lets_a_child_end_by_itself(tmp_path: Path) -> None:
    result = run_process([sys.executable, "-c", EXIT, str(tmp_path)], timeout_s=90)
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        "child 0\nfiles 1\n",
        "",
    )


def test_work_queue__ends_work_before_a_fork_and_has_new_threads_in_the_child() -> None:
    queue = WorkQueue("queue", 2)
    ended: list[int] = []
    begins = threading.Event()

    def work() -> None:
        begins.set()
        threading.Event().wait(0.1)
        ended.append(1)

    queue.submit(work)
    begins.wait()
    assert (
        forked(lambda: (len(ended), queue.submit(int, 7).result())).result == "(1, 7)"
    )
    assert queue.submit(int, 7).result() == 7
    queue.close()


@pytest.mark.parametrize("lines_at_once", [2, slow_case(1)])
def test_work_queue__may_be_forked_in_a_signal_handler_within_a_wait(
    lines_at_once: int,
) -> None:
    """A wait that holds a lock when it is interrupted, which the work needs to end,
    would never end."""
    for line in range(0, 12, lines_at_once):
        fork_within_a_wait(line)


def fork_within_a_wait(line: int) -> None:
    queue, may_end, lines = WorkQueue("queue"), threading.Event(), itertools.count()

    def fork_at_line(_frame: Any, event: str, _value: Any) -> Any:
        if event == "line" and next(lines) == line:
            may_end.set()
            assert forked(lambda: 1).result == "1"
        return fork_at_line

    task = queue.submit(may_end.wait)
    # For lines that the wait does not reach before the work ends.
    timer = threading.Timer(0.1, may_end.set)
    timer.start()
    sys.settrace(fork_at_line)
    try:
        assert task.result()
    finally:
        sys.settrace(None)
    timer.join()
    queue.close()


def test_fork_lock__is_free_in_a_child_unless_the_thread_that_forks_has_it() -> None:
    own, other = fork_lock(), fork_lock()
    holds, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with other:
            holds.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    with own:
        assert (
            forked(lambda: (own._is_owned(), other.acquire(timeout=5))).result
            == "(True, True)"
        )
    is_over.set()
    thread.join()


def test_load_state_dict__is_refused_in_a_child_that_has_no_engine(
    tmp_path: Path,
) -> None:
    """Also before the first step, since the files would be those of the parent."""
    model = nn.Linear(4, 4)
    optimizer = InterleavedAdamW(
        model.parameters(),
        policy="pipelined",
        machine=machine(tmp_path),
        storage=tmp_path,
    )

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    assert "belongs to the process that was forked" in str(forked(step).error)
    assert not list(tmp_path.iterdir())
    step()
    optimizer.close()
    with pytest.raises(EngineError, match="closed"):
        optimizer.step()
