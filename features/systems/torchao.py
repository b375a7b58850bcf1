"""The offloading optimizer of torchao, as `compare --against` measures it."""

import importlib
from typing import Any

import torch

from ebbtide.interleave.compare.baselines import SETTINGS, Baseline, Update
from ebbtide.interleave.compare.runs import CannotRun


def _make(params: list[Any]) -> Update:
    offload = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    if params[0].device.type != "cuda":
        raise CannotRun("it needs a GPU")
    update: Update = offload(params, torch.optim.AdamW, **SETTINGS, fused=True).step
    return update


BASELINE = Baseline(
    "CPUOffloadOptimizer, which keeps its state in the parameters' precision", _make
)
