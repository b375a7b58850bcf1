"""Training for real, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ebbtide.errors import UserError
from ebbtide.interleave.engine.optimizer import InterleavedAdamW
from ebbtide.interleave.experiments.compare.job import Job, Shape
from ebbtide.interleave.experiments.compare.testbed import Box
from ebbtide.interleave.model.schedule import Schedule

# What all optimizers are told.
LR = 1e-3
MAX_GRAD_NORM = 1.0


class CannotRun(UserError):
    """A policy or another optimizer that does not run here."""


class Steps(Protocol):
    """An optimizer."""

    def step(self) -> None: ...


@dataclass(frozen=True)
class Times:
    """Of one iteration, s."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class Run:
    """A policy's training. schedules, losses: of each iteration."""

    policy: str
    schedules: list[Schedule]
    losses: list[float]


@dataclass(frozen=True)
class Training:
    """What is trained, how long, and who is told of each iteration."""

    shape: Shape
    seed: int
    iterations: int
    subgroup_params: int
    tell: Callable[[], object]


def run_policy(policy: str, training: Training, box: Box) -> Run:
    """Train under a policy. Raises CannotRun where the optimizer has no plan for it, or no room."""
    job = Job(training.shape, training.seed, box.device)
    try:
        optimizer = InterleavedAdamW(
            job.params,
            lr=LR,
            policy=policy,
            machine=box.machine,
            subgroup_params=training.subgroup_params,
            memory_budget=box.memory_budget,
            max_grad_norm=MAX_GRAD_NORM,
            device=box.make_device(),
            threads=box.threads,
        )
    except UserError as error:
        raise CannotRun(str(error)) from error
    steps: list[tuple[Schedule, Times]] = []

    def keep(times: Times) -> None:
        last = optimizer.last_schedule
        if last is None or (steps and last is steps[-1][0]):
            raise CannotRun("the device ran out of memory in a step, which went on without the plan")
        steps.append((last, times))

    with closing(optimizer):
        losses = train(job, optimizer, training, keep)
    return Run(policy, [_by_phases(*step) for step in steps], losses)


def train(job: Job, optimizer: Steps, training: Training, keep: Callable[[Times], object]) -> list[float]:
    """Train for so many iterations, and return the losses. keep: is given the times of each."""
    losses = []
    with _deterministic():
        _wait(job)
        begin = time.perf_counter()
        for _ in range(training.iterations):
            loss = job.forward()
            _wait(job)
            forward = time.perf_counter()
            loss.backward()
            _wait(job)
            backward = time.perf_counter()
            optimizer.step()
            _wait(job)
            update = time.perf_counter()
            keep(Times(forward - begin, backward - forward, update - backward))
            losses.append(loss.item())
            training.tell()
            begin = update
    return losses


def _by_phases(schedule: Schedule, times: Times) -> Schedule:
    """The schedule with the phases as the loop knows them: an update begins where the backward has returned, also where
    the optimizer first does other work than its plan's, such as a norm."""
    forward, backward = times.forward_s, times.backward_s
    return replace(
        schedule,
        workload=replace(schedule.workload, other_s=0.0, forward_s=forward, backward_s=backward),
        other_s=0.0,
        forward_s=forward,
        backward_s=backward,
        update_s=max(0.0, schedule.iteration_s - forward - backward),
    )


def _wait(job: Job) -> None:
    if job.device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _deterministic() -> Iterator[None]:
    """Else a GPU's backward differs from run to run, whatever the optimizer does. Its matrix products need
    CUBLAS_WORKSPACE_CONFIG too, which whoever starts the process has to set."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # That would be timed with what allocates.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
