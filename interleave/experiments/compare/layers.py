"""Trains a small GPT under each choice for weights and activations of its layers, measured beside predicted."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any, NamedTuple

import torch

from ebbtide.errors import UserError
from ebbtide.interleave.engine.devices.device import Device, Direction
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.layers.activations import offload_activations
from ebbtide.interleave.engine.layers.weights import stream_weights
from ebbtide.interleave.experiments.compare.results import Pair, finite_losses
from ebbtide.interleave.experiments.compare.runs import LR, Job, PhaseWaits, Shape, synchronize
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.state_bytes import PARAM_BYTES

# Choices for all layers, and those by plan, for which the memory is limited.
CHOICES = (
    *product(("keep", "recompute", "offload"), ("resident", "streamed")),
    *(("auto", "resident"), ("auto", "streamed"), ("auto", "auto")),
)
# Iterations that are measured for the plan, and the one that makes it.
WARMUP = 4
_HEAD = 64
# By default: layers, the memory as a share of what all layers need, and phases that are long beside arithmetic.
_LAYERS, _BUDGET_SHARE, _WAITS = 6, 0.6, PhaseWaits(0.3, 0.6)
# The link moves the weights of a layer in this share of its forward.
_WEIGHTS_OF_FORWARD = 0.5
_UNLIMITED = 1e15
# Sequences of 64 tokens.
_BATCH, _GPU_BATCH = 2, 64


class LoggedCopy(NamedTuple):
    """A copy over the link: kind of its operation in a plan, and when it ran, s."""

    kind: str
    start_s: float
    end_s: float
    nbytes: int


class LoggingDevice(EmulatedDevice):
    """An emulated device that logs its copies, and the memory of layers over time."""

    def __init__(self, link_bytes_per_s: float | None = None) -> None:
        super().__init__(None, link_bytes_per_s, link_bytes_per_s)
        self.copies: list[LoggedCopy] = []
        self.memory: list[tuple[float, int]] = []
        # Addresses of weights on the host.
        self.weights: set[int] = set()

    def claim(self, nbytes: int) -> None:
        super().claim(nbytes)
        self.memory.append((time.perf_counter(), self._claimed))

    def unclaim(self, nbytes: int) -> None:
        super().unclaim(nbytes)
        self.memory.append((time.perf_counter(), self._claimed))

    def run_copies(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        start_s = time.perf_counter()
        super().run_copies(direction, pairs)
        source = pairs[0][0]
        if direction == "h2d":
            kind = "weights up" if source.data_ptr() in self.weights else "activation up"
        else:
            # Activations are bytes.
            kind = "activation down" if source.dtype == torch.uint8 else "layer gradient down"
        nbytes = sum(one.nbytes for one, _ in pairs)
        self.copies.append(LoggedCopy(kind, start_s, time.perf_counter(), nbytes))


@dataclass(frozen=True)
class LayerRun:
    """The figures of one choice; bytes are those of an iteration. What only an emulated device counts is else None.

    Attributes:
        copies: Of the median iteration, with times from its start.
        memory: The same of the device memory of layers: (s, bytes from there on).
        kinds: Number of layers of each kind, as the plan chooses.
    """

    activations: str
    weights: str
    iteration_ms: Pair
    device_bytes: Pair
    h2d_bytes: Pair | None
    d2h_bytes: Pair | None
    kinds: dict[str, int]
    losses: list[float]
    losses_equal: bool
    copies: Sequence[LoggedCopy]
    memory: Sequence[tuple[float, int]]
    predicted: Schedule

    @property
    def name(self) -> str:
        return f"{self.activations}, {self.weights}"

    def as_json(self) -> dict[str, Any]:
        pairs = {
            key: None if (pair := getattr(self, key)) is None else pair.as_json()
            for key in ("iteration_ms", "device_bytes", "h2d_bytes", "d2h_bytes")
        }
        losses = {"losses_equal": self.losses_equal, "losses": finite_losses(self.losses)}
        return {"activations": self.activations, "weights": self.weights, **pairs, "layers": self.kinds, **losses}


@dataclass(frozen=True)
class LayerComparison:
    """The runs of all choices. `memory_budget` limits those by plan."""

    device: str
    link_bytes_per_s: float | None  # None: a GPU.
    shape: Shape
    iterations: int
    memory_budget: float
    runs: list[LayerRun]

    @property
    def losses_equal(self) -> bool:
        return all(run.losses_equal for run in self.runs)

    @property
    def close(self) -> int:
        """The number of runs whose iteration is within 10 % of the prediction."""
        return sum(abs(run.iteration_ms.measured / run.iteration_ms.predicted - 1) <= 0.1 for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide compare --layers --json` prints."""
        emulated, link = self.link_bytes_per_s is not None, self.link_bytes_per_s
        device = {"name": self.device, "emulated": emulated, "link_bytes_per_s": link}
        return {
            "device": {**device, "memory_budget": self.memory_budget},
            "job": {"params": self.shape.params, "layers": self.shape.layers, "width": self.shape.width},
            "iterations": self.iterations,
            "warmup_iterations": WARMUP,
            "losses_equal": self.losses_equal,
            "results": [run.as_json() for run in self.runs],
        }


@dataclass(frozen=True)
class LayerTraining:
    """The job of all runs, and its device."""

    shape: Shape
    waits: PhaseWaits
    iterations: int
    seed: int
    link_bytes_per_s: float | None

    def job(self) -> Job:
        on_gpu = self.link_bytes_per_s is None
        device = torch.device("cuda" if on_gpu else "cpu")
        return Job(self.shape, self.seed, device, self.waits, _GPU_BATCH if on_gpu else _BATCH)

    def train(self, activations: str, weights: str, budget_bytes: float, plain_losses: list[float]) -> LayerRun:
        """Train under a choice. Raises UserError where it has no plan within the budget."""
        job = self.job()
        log = None if self.link_bytes_per_s is None else LoggingDevice(self.link_bytes_per_s)
        device: Device | None = log
        with ExitStack() as stack:
            streamed = stack.enter_context(
                stream_weights(job.model, memory_budget=budget_bytes, device=device, weights=weights)
            )
            moved = stack.enter_context(
                offload_activations(job.model, memory_budget=0, device=device, activations=activations)
            )
            if log is not None:
                log.weights = {param.data_ptr() for param in job.model.layers.parameters()}
            losses, begins = train(job, self.iterations)
            predicted = moved.predicted
            if predicted is None:
                raise UserError(
                    f"activations {activations}, weights {weights}: no plan needs less than {budget_bytes:,.0f} bytes "
                    "of device memory: raise --memory-budget"
                )
            kinds = dict(Counter(moved.choices.values()) + Counter(streamed.choices.values()))
            peak = _peak_bytes(log, begins) if log is not None else moved.peak_bytes
        lengths = [end - begin for begin, end in pairwise(begins)]
        middle = sorted(range(WARMUP, len(lengths)), key=lengths.__getitem__)[(len(lengths) - WARMUP - 1) // 2]
        begin_s, end_s = begins[middle : middle + 2]
        copies = [] if log is None else _within(log.copies, begin_s, end_s)
        moves: dict[Direction, Pair | None] = {
            direction: None if log is None else Pair(_bytes(copies, direction), predicted.moved_bytes(direction))
            for direction in ("h2d", "d2h")
        }
        line = [one.total for one in predicted.layer_memory_line()[1]]
        return LayerRun(
            activations,
            weights,
            Pair(1e3 * median(lengths[WARMUP:]), 1e3 * predicted.iteration_s),
            Pair(peak, max(line)),
            moves["h2d"],
            moves["d2h"],
            kinds,
            losses,
            losses == plain_losses,
            copies,
            [] if log is None else _memory_within(log.memory, begin_s, end_s),
            predicted,
        )


def train(job: Job, iterations: int) -> tuple[list[float], list[float]]:
    """Train, and return the losses and the start of each iteration, with the end of the last one."""
    optimizer = torch.optim.AdamW(job.params, lr=LR)
    losses, begins = [], []
    for _ in range(iterations):
        begins.append(time.perf_counter())
        loss = job.forward()
        loss.backward()
        optimizer.step()
        synchronize(job)
        losses.append(loss.item())
    return losses, [*begins, time.perf_counter()]


def _within(copies: Sequence[LoggedCopy], begin_s: float, end_s: float) -> list[LoggedCopy]:
    return [
        one._replace(start_s=one.start_s - begin_s, end_s=one.end_s - begin_s)
        for one in copies
        if begin_s <= one.start_s < end_s
    ]


def _memory_within(log: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> list[tuple[float, int]]:
    before = [size for at_s, size in log if at_s < begin_s]
    return [(0.0, before[-1] if before else 0), *((at - begin_s, size) for at, size in log if begin_s <= at < end_s)]


def _peak_bytes(log: LoggingDevice, begins: Sequence[float]) -> int:
    """Return the peak of the iterations under the plan."""
    return max((size for at_s, size in log.memory if at_s >= begins[WARMUP]), default=0)


def _bytes(copies: Sequence[LoggedCopy], direction: Direction) -> int:
    return sum(one.nbytes for one in copies if one.kind.endswith("up") == (direction == "h2d"))


def compare_layers(
    params: int,
    iterations: int,
    memory_budget: float | None,
    link_bytes_per_s: float | None,
    waits: PhaseWaits | None,
    seed: int,
    progress: Callable[[str, int, int], object] = lambda *_: None,
    choices: Sequence[tuple[str, str]] = CHOICES,
) -> LayerComparison:
    """Train under each choice, one after the other, on an emulated device, or on a GPU if there is one and no rate of a
    link is given. The first choice keeps all.

    Raises UserError where a setting is invalid, or no plan fits the budget."""
    if iterations < WARMUP + 2:
        raise UserError(f"--steps must be at least {WARMUP + 2} with --layers: the first {WARMUP} make the plan")
    shape = Shape(_LAYERS, max(1, round((params / (12 * _LAYERS)) ** 0.5 / _HEAD)) * _HEAD)
    on_gpu = torch.cuda.is_available() and link_bytes_per_s is None
    if on_gpu and any(waits or ()):
        raise UserError("--forward-ms and --backward-ms are for an emulated device: add --emulate-link, e.g. 1GB")
    waits = PhaseWaits() if on_gpu else waits or _WAITS
    if not on_gpu and link_bytes_per_s is None:
        link_bytes_per_s = PARAM_BYTES * shape.params / (_WEIGHTS_OF_FORWARD * (waits.forward_s or _WAITS.forward_s))
    training = LayerTraining(shape, waits, iterations, seed, link_bytes_per_s)
    plain_losses, _ = train(training.job(), iterations)
    runs: list[LayerRun] = []
    for number, (activations, weights) in enumerate(choices):
        progress(f"{activations}, {weights}", number, len(choices))
        limit = _UNLIMITED
        if "auto" in (activations, weights):
            # All that is kept and resident.
            memory_budget = limit = memory_budget or _BUDGET_SHARE * runs[0].device_bytes.predicted
        runs.append(training.train(activations, weights, limit, plain_losses))
    name = torch.cuda.get_device_name() if on_gpu else "emulated device"
    assert memory_budget is not None
    return LayerComparison(name, link_bytes_per_s, shape, iterations, memory_budget, runs)
