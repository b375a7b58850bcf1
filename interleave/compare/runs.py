"""Trains the job, and measures each phase of each iteration."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.errors import UserError
from ebbtide.interleave.compare.testbed import Testbed
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies import Policy

_VOCABULARY, _CONTEXT, _BATCH, _HEAD = 512, 64, 2, 64
# Where phases wait, little arithmetic is left beside that.
_CONTEXT_WITH_WAITS, _BATCH_WITH_WAITS = 8, 1
# Half precision, which optimizer offload is made for.
_DTYPE = torch.bfloat16
_MIN_PARAMS, _MAX_PARAMS = 100_000, 1e11
# Each token follows from the one before up to a random choice of this many, so that
# there is something to learn.
_CHOICES = 4


@dataclass(frozen=True)
class Shape:
    """Size of a GPT.

    Layers have about 12 width**2 parameters each; embeddings and a head are added.
    """

    layers: int
    width: int

    @property
    def params(self) -> int:
        return (
            self.layers * (12 * self.width + 13) * self.width
            + (2 * _VOCABULARY + _CONTEXT + 2) * self.width
        )


def find_shape(params: int) -> Shape:
    """Return the shape with about `params` parameters that is about 128 times as wide
    as it is deep."""
    if not _MIN_PARAMS <= params <= _MAX_PARAMS:
        raise UserError(
            f"--params {params:g}: must be from {_MIN_PARAMS:g} to {_MAX_PARAMS:g}"
        )
    width = max(1, round((params * 128 / 12) ** (1 / 3) / _HEAD)) * _HEAD
    widths = {max(_HEAD, width + step) for step in (-_HEAD, 0, _HEAD)}
    shapes = [
        Shape(max(1, round((params - Shape(0, width).params) / (12 * width**2))), width)
        for width in widths
    ]
    return min(shapes, key=lambda shape: (abs(shape.params - params), shape.width))


class PhaseWaits(NamedTuple):
    """Seconds that forward and backward wait in addition to their arithmetic, as if a
    GPU computed meanwhile."""

    forward_s: float = 0.0
    backward_s: float = 0.0


class _Wait(torch.autograd.Function):  # type: ignore[misc]
    """The identity, which waits in the forward and in the backward.

    In the backward it waits before the gradients of what came before it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, waits: PhaseWaits) -> torch.Tensor:
        ctx.backward_s = waits.backward_s
        time.sleep(waits.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.backward_s)
        return gradient, None


def _waited(
    x: torch.Tensor, waits: PhaseWaits, shape: Shape, *modules: nn.Module
) -> torch.Tensor:
    """Wait for as large a share of the phases as modules have of the parameters."""
    if not any(waits):
        return x
    share = (
        sum(param.numel() for module in modules for param in module.parameters())
        / shape.params
    )
    return _Wait.apply(x, PhaseWaits(*(share * seconds for seconds in waits)))


class _Layer(nn.TransformerEncoderLayer):  # type: ignore[misc]
    """A layer that waits in proportion to its parameters."""

    def __init__(self, shape: Shape, waits: PhaseWaits) -> None:
        width = shape.width
        super().__init__(
            width,
            width // _HEAD,
            4 * width,
            0.0,
            "gelu",
            batch_first=True,
            norm_first=True,
        )
        self._waits = waits
        self._shape = shape

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # A layer that is computed again ends with the last tensor that it saves, so
        # that this comes first.
        return super().forward(
            _waited(x, self._waits, self._shape, self), mask, is_causal=True
        )


class GPT(nn.Module):  # type: ignore[misc]
    """Maps tokens (batch, length) to the logits of the next ones.

    Each layer waits in proportion to its parameters.
    """

    def __init__(self, shape: Shape, waits: PhaseWaits | None = None) -> None:
        super().__init__()
        self._waits = waits or PhaseWaits()
        self._shape = shape
        self.token = nn.Embedding(_VOCABULARY, shape.width)
        self.position = nn.Embedding(_CONTEXT, shape.width)
        self.layers = nn.ModuleList(
            _Layer(shape, self._waits) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        x = _waited(x, self._waits, self._shape, self.token, self.position)
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, tokens.device, x.dtype
        )
        for layer in self.layers:
            x = layer(x, mask)
        return _waited(
            self.head(self.norm(x)), self._waits, self._shape, self.norm, self.head
        )


class Job:
    """A model and its tokens, equal bit for bit for the same shape and seed.

    With waits, it has few tokens.
    """

    def __init__(
        self,
        shape: Shape,
        seed: int,
        device: torch.device,
        waits: PhaseWaits | None = None,
        batch: int | None = None,
    ) -> None:
        """Make the model.

        `batch` is the number of sequences of full length; None means two, or few tokens
        where phases wait.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = GPT(shape, waits).to(device, _DTYPE)
        self.device = device
        is_small = batch is None and any(waits or ())
        self._context = _CONTEXT_WITH_WAITS if is_small else _CONTEXT
        self._batch = _BATCH_WITH_WAITS if is_small else batch or _BATCH
        self._random = torch.Generator().manual_seed(seed)

    @property
    def params(self) -> list[Any]:
        return list(self.model.parameters())

    def forward(self) -> torch.Tensor:
        """Return the loss on the next batch."""
        self.model.zero_grad()
        tokens = self._tokens().to(self.device)
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _tokens(self) -> torch.Tensor:
        columns = [torch.randint(_VOCABULARY, (self._batch,), generator=self._random)]
        choices = torch.randint(
            _CHOICES, (self._batch, self._context), generator=self._random
        )
        for choice in choices.T:
            columns.append((5 * columns[-1] + choice) % _VOCABULARY)
        return torch.stack(columns, dim=1)


# The norm is computed, and so high that no step is clipped and speculative updates are
# valid.
LR = 1e-3
MAX_GRAD_NORM = 1e4


class CannotRun(UserError):
    """A policy or another optimizer cannot run here."""


class TrainingStep(NamedTuple):
    """An iteration of a training loop: its begin, its phases, and its loss.

    The begin is on the clock of time.perf_counter.
    """

    begin_s: float
    forward_s: float
    backward_s: float
    update_s: float
    loss: float

    @property
    def iteration_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


@dataclass(frozen=True)
class PolicyRun:
    """The training under one policy: the schedule and the loss of each iteration."""

    policy: str
    schedules: list[Schedule]
    losses: list[float]


@dataclass(frozen=True)
class TrainingRun:
    """Settings of one training run."""

    shape: Shape
    seed: int
    iterations: int
    subgroup_params: int
    on_iteration: Callable[[], object]
    waits: PhaseWaits
    # Whether gradients are copied to the host while the backward computes the others.
    streamed: bool


def run_policy(policy: Policy, training: TrainingRun, testbed: Testbed) -> PolicyRun:
    """Train under a policy. Raises CannotRun where the policy has no plan for this job,
    or memory does not suffice."""
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
            model=None if policy.overlap == "none" else job.model,
            storage=testbed.storage or None,
            host_memory_budget=testbed.machine.host_memory_bytes
            if testbed.storage
            else None,
        )
    except UserError as error:
        raise CannotRun(str(error)) from error
    schedules: list[Schedule] = []

    def add_schedule() -> None:
        # A step whose operations end in the next iteration has its schedule when they
        # have ended.
        if (schedule := optimizer.last_schedule) is not None and not (
            schedules and schedule is schedules[-1]
        ):
            schedules.append(schedule)

    def end_step() -> None:
        add_schedule()
        training.on_iteration()

    with closing(optimizer):
        try:
            steps = train(job, optimizer.step, training.iterations, end_step)
            optimizer.synchronize()
        except EngineError as error:
            raise CannotRun(str(error)) from error
        add_schedule()
    if len(schedules) < len(steps):
        raise CannotRun(
            "the device ran out of memory during a step, which was finished without "
            "the plan"
        )
    return PolicyRun(
        policy.text,
        list(map(_with_phases, schedules, steps)),
        [step.loss for step in steps],
    )


def train(
    job: Job,
    update: Callable[[], object],
    iterations: int,
    on_iteration: Callable[[], object] = lambda: None,
) -> list[TrainingStep]:
    """Train a job, and call `on_iteration` after each step.

    `update` changes the parameters of the job.
    """

    def now_s() -> float:
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    steps = []
    with _deterministic_algorithms():
        begin_s = now_s()
        for _ in range(iterations):
            loss = job.forward()
            forward_end_s = now_s()
            loss.backward()
            backward_end_s = now_s()
            update()
            end_s = now_s()
            phases_s = (
                forward_end_s - begin_s,
                backward_end_s - forward_end_s,
                end_s - backward_end_s,
            )
            steps.append(TrainingStep(begin_s, *phases_s, loss.item()))
            on_iteration()
            begin_s = end_s
    return steps


def _with_phases(schedule: Schedule, step: TrainingStep) -> Schedule:
    """Return the schedule with the phases of the training loop. The update begins where
    the backward has returned, before the optimizer's norm, too; the workload's forward
    has no waits for late updates."""
    forward, backward = step.forward_s, step.backward_s
    waited_s = max(0.0, schedule.forward_s - schedule.workload.forward_s)
    return replace(
        schedule,
        workload=replace(
            schedule.workload,
            other_s=0.0,
            forward_s=max(0.0, forward - waited_s),
            backward_s=backward,
        ),
        other_s=0.0,
        forward_s=forward,
        backward_s=backward,
        update_s=max(0.0, schedule.iteration_s - forward - backward),
    )


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Make the backward on a GPU give the same bits in each run.

    Matrix products there also need CUBLAS_WORKSPACE_CONFIG, which has to be set before
    the process uses CUDA."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    # Filling would be part of the measured time of each allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
