"""Lion: the sign of the momentum with decoupled weight decay.

The source is Chen et al., arXiv:2302.06675, algorithm 2.
"""

from ebbtide.interleave.engine.rules.arithmetic import sign
from ebbtide.interleave.engine.rules.rule import Group, UpdateRule, register


def _formula(g, p, m, b1, s1, b2, s2, kept, lr):  # type: ignore[no-untyped-def]
    """b1, s1, b2 and s2 are beta1, 1 - beta1, beta2 and 1 - beta2."""
    return kept * p - lr * sign(b1 * m + s1 * g), b2 * m + s2 * g


def _factors(group: Group, step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    return beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * group["weight_decay"], lr


register(
    UpdateRule(
        name="lion",
        title="Lion",
        moments=("exp_avg",),
        defaults={"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
        formula=_formula,
        factors=_factors,
    )
)
