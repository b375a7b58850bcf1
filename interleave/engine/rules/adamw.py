"""AdamW: decoupled weight decay, in the order of torch.optim.AdamW.

The source is Loshchilov and Hutter, arXiv:1711.05101.
"""

import math
from dataclasses import dataclass

from ebbtide.interleave.engine.rules.arithmetic import divide, square_root
from ebbtide.interleave.engine.rules.rule import Group, Scalars, UpdateRule, register


def _formula(g, p, m, v, b1, s1, b2, s2, kept, rate, root, eps):  # type: ignore[no-untyped-def]
    """b1, s1, b2 and s2 are beta1, 1 - beta1, beta2 and 1 - beta2."""
    m = m + s1 * (g - m) if s1 < 0.5 else g - b1 * (g - m)
    v = b2 * v + s2 * g * g
    return kept * p - divide(rate * m, divide(square_root(v), root) + eps), m, v


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of AdamW, named as in torch. `weight_decay` is decoupled."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def scalars(self, step: int, scale: float = 1.0) -> Scalars:
        """Return the factors of a step as `UpdateRule.scalars`."""
        return ADAMW.scalars(
            {**vars(self), "betas": (self.beta1, self.beta2)}, step, scale
        )


def moment_factors(
    group: Group, step: int
) -> tuple[float, float, float, float, float, float]:
    """Return the factors that a step applies to the moments.

    They are beta1, 1 - beta1, beta2, 1 - beta2, the rate and the root of the
    corrections of both moments."""
    beta1, beta2 = group["betas"]
    return (
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        float(group["lr"]) / (1 - beta1**step),
        math.sqrt(1 - beta2**step),
    )


def _factors(group: Group, step: int) -> tuple[float, ...]:
    *shares, rate, root = moment_factors(group, step)
    return (
        *shares,
        1 - float(group["lr"]) * group["weight_decay"],
        rate,
        root,
        group["eps"],
    )


ADAMW = register(
    UpdateRule(
        name="adamw",
        title="AdamW",
        moments=("exp_avg", "exp_avg_sq"),
        defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        formula=_formula,
        factors=_factors,
        unsupported=("amsgrad", "maximize", "differentiable"),
    )
)
