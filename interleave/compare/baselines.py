"""Other optimizers that a comparison measures: torch's own, and optimizers of features
(seam `baselines`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ebbtide import seams
from ebbtide.interleave.compare.runs import LR

Update = Callable[[], object]
# The weight decay is InterleavedAdamW's default.
SETTINGS = {"lr": LR, "weight_decay": 0.01}


class Baseline(NamedTuple):
    """Another optimizer to compare with: a description for the user, and a step for the
    parameters of a job, without clipping."""

    description: str
    make: Callable[[list[Any]], Update]


def update_of_masters(
    params: list[Any], device: torch.device, make: Callable[..., Any], **settings: bool
) -> Update:
    """Return the step of an optimizer of fp32 masters, with the copies and casts of
    half-precision parameters."""
    masters = [param.detach().to(device, torch.float32, copy=True) for param in params]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = make(masters, **SETTINGS, **settings)

    def update() -> None:
        for param, master in zip(params, masters, strict=True):
            master.grad.copy_(param.grad)
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            param.detach().copy_(master)

    return update


def _torch(params: list[Any]) -> Update:
    return update_of_masters(params, params[0].device, torch.optim.AdamW, fused=True)


_TORCH = Baseline("fused AdamW of fp32 masters on the device itself", _torch)


def baseline_names() -> list[str]:
    """Return the names of all baselines."""
    return ["torch", *seams.plugs("baselines")]


def find_baseline(name: str) -> Baseline:
    """Return the baseline of a name in `baseline_names`."""
    baseline: Baseline = (
        _TORCH if name == "torch" else seams.plugs("baselines")[name].load()
    )
    return baseline
