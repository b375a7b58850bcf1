"""Other optimizers on the same job: how long they take, and the losses they come to. Each is another AdamW than ours
(another order of rounding, or half-precision state), so their losses are shown and not compared."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import Any

import torch

from ebbtide.interleave.experiments.compare.job import Job
from ebbtide.interleave.experiments.compare.runs import LR, MAX_GRAD_NORM, CannotRun, Steps, Times, Training, train
from ebbtide.interleave.experiments.compare.testbed import Box

# As InterleavedAdamW's default.
_WEIGHT_DECAY = 0.01


class _Clipped:
    """An optimizer that takes the parameters as they are."""

    def __init__(self, params: list[Any], optimizer: Any) -> None:
        self._params = params
        self._optimizer = optimizer

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, MAX_GRAD_NORM)
        self._optimizer.step()


class _Masters:
    """An optimizer of fp32 masters, with the copies and casts that half-precision parameters need around it."""

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


def _torch(params: list[Any]) -> Steps:
    def make(masters: list[Any]) -> Any:
        return torch.optim.AdamW(masters, lr=LR, weight_decay=_WEIGHT_DECAY, fused=True)

    return _Masters(params, params[0].device, make)


def _deepspeed(params: list[Any]) -> Steps:
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    settings = {"lr": LR, "weight_decay": _WEIGHT_DECAY, "adamw_mode": True, "fp32_optimizer_states": True}
    return _Masters(params, torch.device("cpu"), lambda masters: adam(masters, **settings))


def _torchao(params: list[Any]) -> Steps:
    offload = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    if params[0].device.type != "cuda":
        raise CannotRun("it needs a GPU")
    return _Clipped(params, offload(params, torch.optim.AdamW, lr=LR, weight_decay=_WEIGHT_DECAY, fused=True))


# What each is, for people.
PEERS: dict[str, tuple[str, Callable[[list[Any]], Steps]]] = {
    "torch": ("fused AdamW of fp32 masters on the device itself", _torch),
    "deepspeed": ("CPU Adam of fp32 masters", _deepspeed),
    "torchao": ("CPUOffloadOptimizer, which keeps its state in the parameters' precision", _torchao),
}


def run_peer(name: str, training: Training, box: Box) -> tuple[list[Times], list[float]]:
    """The times and losses of each iteration. Raises CannotRun where the peer is not here."""
    job = Job(training.shape, training.seed, box.device)
    times: list[Times] = []
    # They talk while they are loaded, and stdout is for the result.
    with redirect_stdout(sys.stderr):
        try:
            optimizer = PEERS[name][1](job.params)
        except ImportError as error:
            there = find_spec(name) is not None
            raise CannotRun(f"not this version: {error}" if there else f"not installed: pip install {name}") from None
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(f"it does not start here: {error!r}") from error
        return times, train(job, optimizer, training, times.append)
