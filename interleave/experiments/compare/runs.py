"""Trains the job, and measures each phase of each iteration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ebbtide.errors import UserError
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.optimizer import InterleavedAdamW
from ebbtide.interleave.experiments.compare.job import Job, PhaseWaits, Shape
from ebbtide.interleave.experiments.compare.testbed import Testbed
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies import parse

# Settings of every optimizer. The norm is computed, and so high that no step is clipped: where updates are computed
# before it is known, they are valid.
LR = 1e-3
MAX_GRAD_NORM = 1e4
# Overlaps that compute updates before all gradients are there, for which gradients must not wait for the step.
_SPECULATIVE = ("backward", "both", "auto")


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
        waits: Times that forward and backward wait in addition to their arithmetic.
        streamed: Whether gradients are copied to the host while the backward computes the others.
    """

    shape: Shape
    seed: int
    iterations: int
    subgroup_params: int
    on_iteration: Callable[[], object]
    waits: PhaseWaits
    streamed: bool


def overlap_of(policy: str) -> str:
    """Return the value of a policy's option `overlap`, none where it has no such option."""
    return parse(policy).options.get("overlap", "none")


def needs_streamed(policy: str) -> bool:
    """Return whether a policy updates before all gradients are there, as far as they are streamed."""
    return overlap_of(policy) in _SPECULATIVE


def run_policy(policy: str, training: TrainingRun, testbed: Testbed) -> PolicyRun:
    """Train under a policy.

    Raises:
        CannotRun: The policy has no plan for this job, or memory does not suffice.
    """
    job = Job(training.shape, training.seed, testbed.device, training.waits)
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
            gradients="streamed" if training.streamed else "kept",
            model=None if overlap_of(policy) == "none" else job.model,
            storage=testbed.storage or None,
            host_memory_budget=testbed.machine.host_memory_bytes if testbed.storage else None,
        )
    except UserError as error:
        raise CannotRun(str(error)) from error
    times: list[PhaseTimes] = []
    schedules: list[Schedule] = []

    def add_schedule() -> None:
        # A step whose operations end in the next iteration has its schedule when they have ended.
        if (schedule := optimizer.last_schedule) is not None and not (schedules and schedule is schedules[-1]):
            schedules.append(schedule)

    def add_step(of_step: PhaseTimes) -> None:
        times.append(of_step)
        add_schedule()

    with closing(optimizer):
        try:
            losses = train(job, optimizer, training, add_step)
            optimizer.synchronize()
        except EngineError as error:
            raise CannotRun(str(error)) from error
        add_schedule()
    if len(schedules) < len(times):
        raise CannotRun("the device ran out of memory during a step, which was finished without the plan")
    return PolicyRun(policy, list(map(_with_phases, schedules, times)), losses)


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
    plan, such as a norm. The workload's forward has no waits for late updates.
    """
    forward, backward = times.forward_s, times.backward_s
    waited_s = max(0.0, schedule.forward_s - schedule.workload.forward_s)
    return replace(
        schedule,
        workload=replace(schedule.workload, other_s=0.0, forward_s=max(0.0, forward - waited_s), backward_s=backward),
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
