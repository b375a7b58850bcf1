"""The end of a dry run: after iterations that are whole, whatever optimizers step in
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn

from ebbtide.features.dryrun.time.iteration_end import IterationEnd
from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.test_session import (
    BATCH,
    LAYER_BYTES,
    WIDTH,
    dry_run,
    held_bytes,
)

Job = Callable[[list[nn.Linear], list[torch.optim.Optimizer]], Any]


def backward(model: nn.Module) -> None:
    """Run a forward and a backward."""
    model(torch.randn(BATCH, WIDTH, device="cuda")).square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train a model by a step."""
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def observe(
    job: Job, number: int = 2, iterations: int = 2
) -> tuple[list[tuple[str, int | None]], int, Any]:
    """Return the phases of a job with so many models and optimizers, the bytes of their
    state, and the last note."""

    def start() -> None:
        models = [nn.Linear(WIDTH, WIDTH).cuda() for _ in range(number)]
        job(models, [torch.optim.AdamW(model.parameters()) for model in models])

    run, _ = dry_run(start, iterations)
    phases = [(phase.phase, phase.iteration) for phase in run.tracker.phases]
    return phases, held_bytes(run, "optimizer_state"), run.notes()[-1]


def updates(phases: list[tuple[str, int | None]]) -> list[int | None]:
    """Return the iterations of the updates."""
    return [iteration for phase, iteration in phases if phase == "update"]


def train_both(models: list[nn.Linear], optimizers: Any) -> None:
    """Train the models in turn, as a GAN."""
    for _ in range(9):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_dry_run__ends_after_the_last_optimizer_of_an_iteration(
    iterations: int,
) -> None:
    phases, state_bytes, _ = run_forked(
        lambda: observe(train_both, iterations=iterations)
    )
    assert updates(phases) == [each for each in range(iterations) for _ in range(2)]
    assert None not in dict(phases).values()
    assert state_bytes == 2 * 2 * LAYER_BYTES


def test_dry_run__waits_for_an_optimizer_that_steps_rarely() -> None:
    def train(models: list[nn.Linear], optimizers: Any) -> None:
        critic, generator = zip(models, optimizers, strict=True)
        for number in range(1, 99):
            step(*critic)
            if number % 5 == 0:
                step(*generator)

    phases, state_bytes, _ = run_forked(lambda: observe(train))
    # its second step has its state beside the gradients
    assert updates(phases) == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9, 10, None]
    assert state_bytes == 2 * 2 * LAYER_BYTES


def test_dry_run__waits_for_the_second_step_of_a_rare_optimizer() -> None:
    def train(models: list[nn.Linear], optimizers: Any) -> None:
        critic, generator = zip(models, optimizers, strict=True)
        for number in range(99):
            if number % 5 == 0:
                step(*generator)
            step(*critic)

    phases, _, _ = run_forked(lambda: observe(train))
    # only its second step has the state of both beside its gradients
    assert updates(phases) == [0, 0, 1, 2, 3, 4, 4, 5, None]


def test_dry_run__waits_for_the_second_step_of_an_optimizer_for_some_iterations() -> (
    None
):
    def train(models: list[nn.Linear], optimizers: Any) -> None:
        first, second = zip(models, optimizers, strict=True)
        step(*first)
        step(*second)
        for _ in range(9):
            step(*first)

    phases, _, _ = run_forked(lambda: observe(train))
    assert updates(phases) == [0, 0, 1, 2, 3, 4, 5, 6]


def test_dry_run__names_an_optimizer_that_was_waited_for_in_vain() -> None:
    def train(models: list[nn.Linear], optimizers: Any) -> None:
        for _ in range(999):
            step(models[0], optimizers[0])

    phases, state_bytes, note = run_forked(lambda: observe(train))
    assert len(updates(phases)) < 999
    assert state_bytes == 2 * LAYER_BYTES
    assert note.startswith("optimizers that did not step in")
    assert note.endswith(": AdamW")


@pytest.mark.parametrize(
    ("kernels", "iterations"), [(90, 200), (4_500, 5), (45_000, 3)]
)
def test_iteration_end__waits_less_for_long_iterations(
    kernels: int, iterations: int
) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    end = IterationEnd(WeakSet())
    end.made.add(optimizer)
    waits = [end.waits(number * kernels, iterations=2) for number in range(300)]
    assert waits == [True] * iterations + [False] * (300 - iterations)


def test_dry_run__does_not_wait_for_an_optimizer_of_the_same_parameters() -> None:
    def train(models: list[nn.Linear], optimizers: Any) -> None:
        another = torch.optim.SGD(models[0].parameters())
        for _ in range(9):
            step(models[0], optimizers[0])
        assert another

    phases, _, _ = run_forked(lambda: observe(train, number=1))
    assert updates(phases) == [0, 1]


def test_dry_run__ends_a_job_without_an_optimizer_after_some_backwards() -> None:
    def job() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        while True:
            backward(model)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None

    def count() -> Any:
        run, _ = dry_run(job)
        gradient_bytes = sum(
            block.size for block in run.memory.blocks if block.category == "gradient"
        )
        numbers = [phase.iteration for phase in run.tracker.phases]
        return numbers, gradient_bytes, run.finished, run.notes()[-1]

    numbers, gradient_bytes, finished, note = run_forked(count)
    assert numbers == [each for each in range(8) for _ in range(2)]
    assert gradient_bytes == 8 * LAYER_BYTES
    assert finished
    assert note.startswith("no optimizer of torch stepped")


def test_dry_run__ends_a_job_without_an_optimizer_and_without_modules() -> None:
    def job() -> None:
        weight = torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True)
        while True:
            torch.autograd.grad((weight @ weight).sum(), weight)

    assert run_forked(lambda: dry_run(job)[0].finished)


def test_dry_run__does_not_end_a_job_that_accumulates_for_long() -> None:
    def train(models: list[nn.Linear], optimizers: Any) -> None:
        for _ in range(9):
            for _ in range(20):
                backward(models[0])
            optimizers[0].step()

    phases, _, _ = run_forked(lambda: observe(train, number=1))
    assert updates(phases) == [0, 1]
