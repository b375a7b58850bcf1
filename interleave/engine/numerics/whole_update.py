"""The update of a whole parameter: the formula for each element, a transform of all at
once, and the rule's finish."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ebbtide.interleave.engine.rules.rule import Scalars, UpdateRule

# Updates elements as `reference.update`: (gradient, state, parameter or None, factors,
# rule).
Update = Callable[
    [torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None, Scalars, UpdateRule],
    None,
]
# Replaces the result of the formula: (values, shape, parts of the factors).
Transform = Callable[[torch.Tensor, tuple[int, int], Any], None]


def update_whole(
    grad: torch.Tensor,
    state: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    scalars: Scalars,
    rule: UpdateRule,
    shape: tuple[int, int],
    update: Update,
    transform: Transform,
) -> None:
    """Update a parameter of a shape by functions for its elements and for all.

    The parameter is flat.
    """
    assert rule.whole_update is not None
    parts = rule.whole_update.parts(scalars, shape)
    values = torch.zeros(grad.numel(), dtype=torch.float32, device="cpu")
    update(grad, (values, *state[1:]), None, parts.scalars, rule)
    transform(values, shape, parts)
    update(values, state[:1], out, parts.finish_scalars, rule.whole_update.finish)
