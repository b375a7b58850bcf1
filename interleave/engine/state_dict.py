"""State dicts: between the optimizer's flat state and what torch.optim.AdamW writes, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.store import EXP_AVG, EXP_AVG_SQ, MASTER, Store

# Whatever torch's defaults are.
_HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
NAMES = {"master": MASTER, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gathered(store: Store, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each parameter its state, (3, elements), in new host memory."""
    found = [torch.empty((3, local(param).numel()), **_HOST) for param in params]
    for number, subgroup in enumerate(store.subgroups):
        state = store.read(number)
        for piece in subgroup.pieces:
            found[piece.param][:, piece.begin : piece.end] = state[:, piece.at : piece.at + piece.end - piece.begin]
    return found


def scatter(store: Store, states: Sequence[torch.Tensor]) -> None:
    """Set the state of every parameter."""
    for number, subgroup in enumerate(store.subgroups):
        state = torch.empty((3, subgroup.params), **_HOST)
        for piece in subgroup.pieces:
            state[:, piece.at : piece.at + piece.end - piece.begin] = states[piece.param][:, piece.begin : piece.end]
        store.write(number, state)


def fresh(param: torch.Tensor) -> torch.Tensor:
    """State of a parameter that has not been updated yet: the master is the parameter, the moments are 0."""
    state = torch.zeros((3, local(param).numel()), **_HOST)
    state[MASTER] = local(param).detach().reshape(-1)
    return state


def entry(param: torch.Tensor, state: torch.Tensor, step: int) -> dict[str, Any]:
    """A parameter's entry in a state dict: torch.optim.AdamW's, and the fp32 master. Of a DTensor, DTensors."""
    shape = local(param).shape
    found: dict[str, Any] = {"step": torch.tensor(float(step), **_HOST)}
    for name, row in NAMES.items():
        found[name] = like(param, state[row].clone().view(shape))
    return found


def parse(param: torch.Tensor, found: Mapping[str, Any], where: str) -> tuple[torch.Tensor, int]:
    """(state, step) of an entry. Without a master, as torch writes it, the master is the parameter. Raises EngineError
    where the entry is not of this parameter."""
    if not isinstance(found, Mapping):
        raise EngineError(f"{where} is {type(found).__name__}: this is not a state dict of AdamW")
    if "max_exp_avg_sq" in found:
        raise EngineError(f"{where} is of AMSGrad, which this optimizer does not do")
    state = fresh(param)
    for name, row in NAMES.items():
        value = found.get(name)
        if value is None and name == "master":
            continue
        if not isinstance(value, torch.Tensor):
            raise EngineError(f"{where} has no {name} that is a tensor: this is not a state dict of AdamW")
        value = local(value)
        if value.shape != local(param).shape:
            shapes = f"{tuple(value.shape)}, the parameter is {tuple(local(param).shape)}"
            raise EngineError(f"{where}: {name} is {shapes}: this is the state dict of another model")
        state[row] = value.reshape(-1)
    try:
        return state, int(found.get("step", 0))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise EngineError(f"{where}: step is not a number: this is not a state dict of AdamW") from None


def like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of something that lies as the parameter does."""
    if not hasattr(param, "to_local"):
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
