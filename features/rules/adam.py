"""Adam with weight decay in the gradient, in the order of torch.optim.Adam.

The source is Kingma and Ba, arXiv:1412.6980.
"""

from dataclasses import replace

from ebbtide.interleave.engine.rules.adamw import ADAMW, moment_factors
from ebbtide.interleave.engine.rules.arithmetic import divide, square_root
from ebbtide.interleave.engine.rules.rule import Group, register


def _formula(g, p, m, v, b1, s1, b2, s2, decay, rate, root, eps):  # type: ignore[no-untyped-def]
    g = g + decay * p
    m = m + s1 * (g - m) if s1 < 0.5 else g - b1 * (g - m)
    v = b2 * v + s2 * g * g
    return p - divide(rate * m, divide(square_root(v), root) + eps), m, v


def _factors(group: Group, step: int) -> tuple[float, ...]:
    *shares, rate, root = moment_factors(group, step)
    return *shares, group["weight_decay"], rate, root, group["eps"]


ADAM = register(
    replace(
        ADAMW,
        name="adam",
        title="Adam",
        unsupported=(*ADAMW.unsupported, "decoupled_weight_decay"),
        defaults={**ADAMW.defaults, "weight_decay": 0.0},
        formula=_formula,
        factors=_factors,
    )
)
