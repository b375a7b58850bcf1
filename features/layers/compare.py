"""Trains a small GPT under each choice for its layers.

Choices are for weights and activations; figures are measured beside predicted.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import torch

from ebbtide.errors import UserError
from ebbtide.features.layers.engine.moving import MovedLayers, mover_of
from ebbtide.features.layers.engine.transfers import SavedStorage
from ebbtide.interleave.compare.compare import CompareConfig, ProgressCallback
from ebbtide.interleave.compare.results import Pair, finite_losses
from ebbtide.interleave.compare.runs import (
    LR,
    Job,
    PhaseWaits,
    Shape,
    TrainingStep,
    train,
)
from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.model.operations import FORWARD, Op, OpKind
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import LayerMemory
from ebbtide.state_bytes import PARAM_BYTES
from ebbtide.units import byte_count

CHOICES = (
    *product(("keep", "recompute", "offload"), ("resident", "streamed")),
    *(("auto", "resident"), ("auto", "streamed"), ("auto", "auto")),
)
# Iterations that are measured for the plan, and the one that makes it.
WARMUP = 4
_HEAD = 64
# By default: layers, the memory as a share of what all layers need, and phases that are
# long beside arithmetic.
_LAYERS, _BUDGET_SHARE, _WAITS = 6, 0.6, PhaseWaits(0.3, 0.6)
# The link moves the weights of a layer in this share of its forward.
_WEIGHTS_OF_FORWARD = 0.5
_UNLIMITED = 1e15
# Sequences of 64 tokens.
_BATCH, _GPU_BATCH = 2, 64


class LoggingDevice(EmulatedDevice):
    """An emulated device that logs its copies and the memory of layers over time.

    Copies have times.
    """

    def __init__(self, link_bytes_per_s: float) -> None:
        super().__init__(None, link_bytes_per_s, link_bytes_per_s)
        self.copies: list[tuple[Op, float, float]] = []
        self.memory: list[LayerMemory] = []
        self.storages: list[SavedStorage] = []
        # Of weights on the host.
        self.addresses: set[int] = set()

    def claim(self, nbytes: int) -> None:
        super().claim(nbytes)
        self._log_memory()

    def unclaim(self, nbytes: int) -> None:
        super().unclaim(nbytes)
        self._log_memory()

    def _log_memory(self) -> None:
        weights = sum(one.nbytes for one in self.storages if one.hold() is not None)
        self.memory.append(
            LayerMemory(time.perf_counter(), weights, 0.0, self._claimed - weights)
        )

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().copy(direction, pairs)
        # What is claimed is known by now.
        self._log_memory()

    def run_copies(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        start_s = time.perf_counter()
        super().run_copies(direction, pairs)
        source = pairs[0][0]
        kind: OpKind = "activation up"
        if direction == "d2h":
            # Activations are bytes.
            kind = (
                "activation down"
                if source.dtype == torch.uint8
                else "layer gradient down"
            )
        elif source.data_ptr() in self.addresses:
            kind = "weights up"
        op = Op(kind, direction, -1, 0, sum(one.nbytes for one, _ in pairs), FORWARD)
        self.copies.append((op, start_s, time.perf_counter()))


@dataclass(frozen=True)
class LayerRun:
    """The figures of one choice.

    `kinds`: number of layers of each; `measured`: the iteration of median length, on a
    GPU without operations and memory.
    """

    activations: str
    weights: str
    iteration_ms: Pair
    device_bytes: Pair
    kinds: dict[str, int]
    losses: list[float]
    losses_equal: bool
    measured: Schedule
    predicted: Schedule

    @property
    def name(self) -> str:
        return f"{self.activations}, {self.weights}"

    def moved_bytes(self, direction: Direction) -> Pair | None:
        """Return the bytes of an iteration; None: not known."""
        moved = [
            schedule.moved_bytes(direction)
            for schedule in (self.measured, self.predicted)
        ]
        return Pair(*moved) if self.measured.plan.ops else None

    def as_json(self) -> dict[str, Any]:
        moved = {f"{name}_bytes": self.moved_bytes(name) for name in ("h2d", "d2h")}
        pairs = {
            "iteration_ms": self.iteration_ms,
            "device_bytes": self.device_bytes,
            **moved,
        }
        return {
            "activations": self.activations,
            "weights": self.weights,
            **{
                key: None if pair is None else pair.as_json()
                for key, pair in pairs.items()
            },
            "layers": self.kinds,
            "losses_equal": self.losses_equal,
            "losses": finite_losses(self.losses),
        }


@dataclass(frozen=True)
class LayerComparison:
    """The runs of all choices. `memory_budget` limits those by plan; without
    `link_bytes_per_s` they are on a GPU."""

    device: str
    link_bytes_per_s: float | None
    shape: Shape
    iterations: int
    memory_budget: float
    runs: list[LayerRun]

    @property
    def losses_equal(self) -> bool:
        return all(run.losses_equal for run in self.runs)

    @property
    def difference(self) -> str:
        """A sentence on the choices whose losses differ."""
        differing = "; ".join(run.name for run in self.runs if not run.losses_equal)
        return f"the losses of {differing} differ from those of the plain job"

    @property
    def close(self) -> int:
        """The number of runs whose iteration is within 10 % of the prediction."""
        return sum(
            abs(run.iteration_ms.measured / run.iteration_ms.predicted - 1) <= 0.1
            for run in self.runs
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide compare --layers --json` prints."""
        link = {
            "emulated": self.link_bytes_per_s is not None,
            "link_bytes_per_s": self.link_bytes_per_s,
        }
        return {
            "device": {
                "name": self.device,
                **link,
                "memory_budget": self.memory_budget,
            },
            "job": {"params": self.shape.params, **asdict(self.shape)},
            "iterations": self.iterations,
            "warmup_iterations": WARMUP,
            "losses_equal": self.losses_equal,
            "results": [run.as_json() for run in self.runs],
        }


@dataclass(frozen=True)
class LayerTraining:
    """The job of all runs. `config` has the waits of its phases, and the link; None: it
    runs on a GPU."""

    shape: Shape
    config: CompareConfig

    def job(self) -> Job:
        on_gpu = self.config.link_bytes_per_s is None
        device = torch.device("cuda" if on_gpu else "cpu")
        return Job(
            self.shape,
            self.config.seed,
            device,
            self.config.waits,
            _GPU_BATCH if on_gpu else _BATCH,
        )

    def run(self, job: Job) -> list[TrainingStep]:
        return train(
            job, torch.optim.AdamW(job.params, lr=LR).step, self.config.iterations
        )

    def run_choice(
        self,
        activations: str,
        weights: str,
        budget_bytes: float,
        plain_losses: list[float],
    ) -> LayerRun:
        """Train under a choice. Raises UserError where it has no plan within the
        budget."""
        job = self.job()
        link = self.config.link_bytes_per_s
        device = None if link is None else LoggingDevice(link)
        # Resident weights are on the host, too, so that all choices copy them.
        options = {"weights": weights, "activations": activations}
        with MovedLayers(
            mover_of(job.model, device), options, budget_bytes, "error"
        ) as moved:
            if device is not None:
                device.storages = moved.weight_storages
                device.addresses = {
                    param.data_ptr() for param in job.model.layers.parameters()
                }
            steps = self.run(job)
            predicted = moved.predicted
            if predicted is None:
                raise UserError(
                    f"activations {activations}, weights {weights}: no plan needs less "
                    f"than {budget_bytes:,.0f} bytes "
                    "of device memory: raise --memory-budget"
                )
            kinds = dict(
                Counter(moved.activations.values()) + Counter(moved.weights.values())
            )
            peak = moved.peak_bytes
        counted = sorted(steps[WARMUP:], key=lambda step: step.iteration_s)
        if device is not None:
            # Under the plan.
            peak = max(
                (
                    round(one.total)
                    for one in device.memory
                    if one.at_s >= steps[WARMUP].begin_s
                ),
                default=0,
            )
        losses = [step.loss for step in steps]
        return LayerRun(
            activations,
            weights,
            Pair(
                1e3 * median(step.iteration_s for step in counted),
                1e3 * predicted.iteration_s,
            ),
            Pair(peak, max(one.total for one in predicted.workload.layer_memory)),
            kinds,
            losses,
            losses == plain_losses,
            _measured(predicted, counted[(len(counted) - 1) // 2], device),
            predicted,
        )


def _measured(
    predicted: Schedule, step: TrainingStep, device: LoggingDevice | None
) -> Schedule:
    """Return a measured iteration, with what its device has logged."""
    begin_s, forward_s, backward_s, update_s, _ = step
    end_s = begin_s + step.iteration_s
    copies = (
        []
        if device is None
        else [one for one in device.copies if begin_s <= one[1] < end_s]
    )
    log = (
        []
        if device is None
        else [one for one in device.memory if begin_s <= one.at_s < end_s]
    )
    memory = [
        LayerMemory(0.0, 0.0, 0.0, 0.0),
        *(one._replace(at_s=one.at_s - begin_s) for one in log),
    ]
    layers = tuple(memory) if log else ()
    workload = replace(
        predicted.workload,
        other_s=0.0,
        forward_s=forward_s,
        backward_s=backward_s,
        layer_memory=layers,
    )
    plan = replace(predicted.plan, ops=tuple(op for op, _, _ in copies))
    starts, ends = (
        [start - begin_s for _, start, _ in copies],
        [end - begin_s for _, _, end in copies],
    )
    return Schedule(plan, workload, starts, ends, 0.0, forward_s, backward_s, update_s)


def compare_layers(
    config: CompareConfig,
    progress: ProgressCallback = lambda *_: None,
    choices: Sequence[tuple[str, str]] = CHOICES,
) -> LayerComparison:
    """Train under each choice, one after the other, on a GPU or an emulated device; the
    first keeps all.

    The device is emulated without a GPU, or with the rate of a link. Raises UserError
    where a setting is invalid, or no plan fits the budget."""
    iterations, link_bytes_per_s = config.iterations, config.link_bytes_per_s
    memory_budget = (
        byte_count(config.memory_budget, "memory_budget")
        if config.memory_budget
        else None
    )
    if iterations < WARMUP + 2:
        raise UserError(
            f"--steps must be at least {WARMUP + 2} with --layers: the first {WARMUP} "
            "make the plan"
        )
    shape = Shape(
        _LAYERS, max(1, round((config.params / (12 * _LAYERS)) ** 0.5 / _HEAD)) * _HEAD
    )
    on_gpu = torch.cuda.is_available() and link_bytes_per_s is None
    if on_gpu and any(config.waits or ()):
        raise UserError(
            "--forward-ms and --backward-ms are for an emulated device: add "
            "--emulate-link, e.g. 1GB"
        )
    waits = PhaseWaits() if on_gpu else config.waits or _WAITS
    if not on_gpu and link_bytes_per_s is None:
        link_bytes_per_s = (
            PARAM_BYTES
            * shape.params
            / (_WEIGHTS_OF_FORWARD * (waits.forward_s or _WAITS.forward_s))
        )
    training = LayerTraining(
        shape, replace(config, waits=waits, link_bytes_per_s=link_bytes_per_s)
    )
    plain_losses = [step.loss for step in training.run(training.job())]
    runs: list[LayerRun] = []
    for number, (activations, weights) in enumerate(choices):
        progress(
            f"{activations}, {weights}", number * iterations, len(choices) * iterations
        )
        limit = _UNLIMITED
        if "auto" in (activations, weights):
            # All that is kept and resident.
            memory_budget = limit = (
                memory_budget or _BUDGET_SHARE * runs[0].device_bytes.predicted
            )
        runs.append(training.run_choice(activations, weights, limit, plain_losses))
    name = torch.cuda.get_device_name() if on_gpu else "emulated device"
    return LayerComparison(
        name, link_bytes_per_s, shape, iterations, memory_budget or _UNLIMITED, runs
    )
