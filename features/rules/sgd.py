"""Stochastic gradient descent with momentum, in the order of torch.optim.SGD."""

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.rules.rule import Group, UpdateRule, register


def _formula(g, p, m, decay, momentum, share, ahead, lr):  # type: ignore[no-untyped-def]
    g = g + decay * p
    # As in torch, a step without momentum neither reads nor writes the momentum of
    # other steps.
    moved = momentum * m + share * g if momentum > 0 else g
    # Nesterov's step looks ahead by one more momentum.
    return p - lr * (
        g + ahead * moved if ahead > 0 else moved
    ), moved if momentum > 0 else m


def _factors(group: Group, step: int) -> tuple[float, ...]:
    momentum = group["momentum"]
    # As in torch, the first gradient is the momentum of the first step.
    share = 1.0 if step == 1 else 1 - group["dampening"]
    return (
        group["weight_decay"],
        momentum,
        share,
        momentum if group["nesterov"] else 0.0,
        float(group["lr"]),
    )


def _check(group: Group) -> None:
    if group["nesterov"] and not (group["momentum"] and not group["dampening"]):
        raise EngineError("nesterov needs a momentum, and no dampening")


SGD = register(
    UpdateRule(
        name="sgd",
        title="SGD",
        moments=("momentum_buffer",),
        defaults={
            "lr": 1e-3,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
        },
        formula=_formula,
        factors=_factors,
        check=_check,
    )
)
