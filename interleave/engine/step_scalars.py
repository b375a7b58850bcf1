"""The factors of a step, from the hyperparameters of the parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ebbtide.interleave.engine.numerics.reference import Hyper, Scalars


def scalars_of(
    params: Sequence[torch.Tensor],
    param_groups: Sequence[Mapping[str, Any]],
    step_count: Callable[[torch.Tensor], int],
    updated: Collection[int],
    scale: float,
) -> list[Scalars | None]:
    """Return the factors of the next update of each parameter.

    Args:
        step_count: Returns how often a parameter was updated before.
        updated: The indices of the parameters that are updated; the factors of others, and of those in no group, are
            None.
        scale: The factor of all gradients.
    """
    hypers = {param: hyper for group in param_groups for hyper in [_hyper(group)] for param in group["params"]}
    # The same object for all parameters of a group with as many updates.
    scalars: dict[tuple[int, int], Scalars] = {}
    result: list[Scalars | None] = []
    for index, param in enumerate(params):
        if index not in updated or param not in hypers:
            result.append(None)
            continue
        hyper, step = hypers[param], step_count(param) + 1
        if (id(hyper), step) not in scalars:
            scalars[id(hyper), step] = hyper.scalars(step, scale)
        result.append(scalars[id(hyper), step])
    return result


def _hyper(group: Mapping[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
