"""Trains the same job with other optimizers: their times and losses.

Each is another AdamW than ebbtide's (another order of rounding, or half-precision state), so losses are shown and not
compared.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from ebbtide.interleave.experiments.compare.job import Job
from ebbtide.interleave.experiments.compare.runs import (
    LR,
    MAX_GRAD_NORM,
    CannotRun,
    PhaseTimes,
    SteppingOptimizer,
    TrainingRun,
    train,
)
from ebbtide.interleave.experiments.compare.testbed import Testbed

# InterleavedAdamW's default.
_WEIGHT_DECAY = 0.01


class _ClippedOptimizer:
    """Gradient clipping before an optimizer that takes half-precision parameters."""

    def __init__(self, params: list[Any], optimizer: Any) -> None:
        self._params = params
        self._optimizer = optimizer

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, MAX_GRAD_NORM)
        self._optimizer.step()


class _MasterOptimizer:
    """An optimizer of fp32 masters, with the copies and casts that half-precision parameters need."""

    def __init__(self, params: list[Any], device: torch.device, make: Callable[[list[Any]], Any]) -> None:
        self._params = params
        self._masters = [param.detach().to(device, torch.float32, copy=True) for param in params]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = make(self._masters)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, MAX_GRAD_NORM)
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad.copy_(param.grad)
        self._optimizer.step()
        for param, master in zip(self._params, self._masters, strict=True):
            param.detach().copy_(master)


def _torch(params: list[Any]) -> SteppingOptimizer:
    def make(masters: list[Any]) -> Any:
        return torch.optim.AdamW(masters, lr=LR, weight_decay=_WEIGHT_DECAY, fused=True)

    return _MasterOptimizer(params, params[0].device, make)


def _deepspeed(params: list[Any]) -> SteppingOptimizer:
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    settings = {"lr": LR, "weight_decay": _WEIGHT_DECAY, "adamw_mode": True, "fp32_optimizer_states": True}
    return _MasterOptimizer(params, torch.device("cpu"), lambda masters: adam(masters, **settings))


def _torchao(params: list[Any]) -> SteppingOptimizer:
    offload = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    if params[0].device.type != "cuda":
        raise CannotRun("it needs a GPU")
    return _ClippedOptimizer(params, offload(params, torch.optim.AdamW, lr=LR, weight_decay=_WEIGHT_DECAY, fused=True))


class Baseline(NamedTuple):
    """Another optimizer: a description for the user, and a function that makes it for the parameters of a job."""

    description: str
    make: Callable[[list[Any]], SteppingOptimizer]


BASELINES = {
    "torch": Baseline("fused AdamW of fp32 masters on the device itself", _torch),
    "deepspeed": Baseline("CPU Adam of fp32 masters", _deepspeed),
    "torchao": Baseline("CPUOffloadOptimizer, which keeps its state in the parameters' precision", _torchao),
}


def run_baseline(name: str, training: TrainingRun, testbed: Testbed) -> tuple[list[PhaseTimes], list[float]]:
    """Train with another optimizer and return the times and the loss of each iteration.

    Raises:
        CannotRun: The optimizer is not installed, or does not start here.
    """
    job = Job(training.shape, training.seed, testbed.device, training.waits)
    times: list[PhaseTimes] = []
    # Some of them print as they are imported, and stdout is for the result.
    with redirect_stdout(sys.stderr):
        try:
            optimizer = BASELINES[name].make(job.params)
        except ImportError as error:
            installed = find_spec(name) is not None
            raise CannotRun(
                f"unsupported version: {error}" if installed else f"not installed: pip install {name}"
            ) from None
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(f"it fails to start here: {error!r}") from error
        return times, train(job, optimizer, training, times.append)
