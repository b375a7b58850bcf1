"""Trains the job, and measures each phase of each iteration."""

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
from ebbtide.interleave.experiments.compare.testbed import Testbed
from ebbtide.interleave.model.schedule import Schedule

# Settings of every optimizer.
LR = 1e-3
MAX_GRAD_NORM = 1.0


class CannotRun(UserError):
    """A policy or another optimizer cannot run here."""


class SteppingOptimizer(Protocol):
    """An optimizer, as far as the training loop needs it."""

    def step(self) -> None: ...


@dataclass(frozen=True)
class PhaseTimes:
    """Time in s of each phase of an iteration."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class PolicyRun:
    """The training under one policy: the schedule and the loss of each iteration."""

    policy: str
    schedules: list[Schedule]
    losses: list[float]


@dataclass(frozen=True)
class TrainingRun:
    """Settings of one training run.

    Attributes:
        shape: Shape of the model.
        seed: Seed of weights and tokens.
        iterations: Number of iterations.
        subgroup_params: Parameters per subgroup.
        on_iteration: Called after each iteration.
    """

    shape: Shape
    seed: int
    iterations: int
    subgroup_params: int
    on_iteration: Callable[[], object]


def run_policy(policy: str, training: TrainingRun, testbed: Testbed) -> PolicyRun:
    """Train under a policy.

    Raises:
        CannotRun: The policy has no plan for this job, or memory does not suffice.
    """
    job = Job(training.shape, training.seed, testbed.device)
    try:
        optimizer = InterleavedAdamW(
            job.params,
            lr=LR,
            policy=policy,
            machine=testbed.machine,
            subgroup_params=training.subgroup_params,
            memory_budget=testbed.memory_budget,
            max_grad_norm=MAX_GRAD_NORM,
            device=testbed.make_device(),
            threads=testbed.threads,
        )
    except UserError as error:
        raise CannotRun(str(error)) from error
    steps: list[tuple[Schedule, PhaseTimes]] = []

    def add_step(times: PhaseTimes) -> None:
        schedule = optimizer.last_schedule
        if schedule is None or (steps and schedule is steps[-1][0]):
            raise CannotRun("the device ran out of memory during a step, which was finished without the plan")
        steps.append((schedule, times))

    with closing(optimizer):
        losses = train(job, optimizer, training, add_step)
    return PolicyRun(policy, [_with_phases(*step) for step in steps], losses)


def train(
    job: Job, optimizer: SteppingOptimizer, training: TrainingRun, on_times: Callable[[PhaseTimes], object]
) -> list[float]:
    """Train a job, call `on_times` with the times of each iteration, and return the losses."""
    losses = []
    with _deterministic_algorithms():
        _synchronize(job)
        begin = time.perf_counter()
        for _ in range(training.iterations):
            loss = job.forward()
            _synchronize(job)
            forward_end = time.perf_counter()
            loss.backward()
            _synchronize(job)
            backward_end = time.perf_counter()
            optimizer.step()
            _synchronize(job)
            update_end = time.perf_counter()
            on_times(PhaseTimes(forward_end - begin, backward_end - forward_end, update_end - backward_end))
            losses.append(loss.item())
            training.on_iteration()
            begin = update_end
    return losses


def _with_phases(schedule: Schedule, times: PhaseTimes) -> Schedule:
    """Return the schedule with the phases of the training loop.

    The update begins where the backward has returned, also where the optimizer first does other work than that of its
    plan, such as a norm.
    """
    forward, backward = times.forward_s, times.backward_s
    return replace(
        schedule,
        workload=replace(schedule.workload, other_s=0.0, forward_s=forward, backward_s=backward),
        other_s=0.0,
        forward_s=forward,
        backward_s=backward,
        update_s=max(0.0, schedule.iteration_s - forward - backward),
    )


def _synchronize(job: Job) -> None:
    if job.device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Make the backward on a GPU give the same bits in each run.

    Matrix products there also need CUBLAS_WORKSPACE_CONFIG, which has to be set before the process uses CUDA.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling would be part of the measured time of each allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
