"""Muon: orthogonalized momentum of whole matrices.

The source is Jordan et al., 2024; the formulas are those in torch.optim.Muon.
"""

import math

import numpy as np

from ebbtide.features.matrices.matrices import MatrixParts, multiply, orthogonalize
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.rules.rule import (
    Group,
    Scalars,
    UpdateRule,
    WholeUpdate,
    register,
)

_ADJUSTMENTS = None, "original", "match_rms_adamw"


def _formula(g, p, m, momentum, share, nesterov):  # type: ignore[no-untyped-def]
    """Return the matrix to orthogonalize, and the momentum. `share` is 1 - momentum."""
    m = m + share * (g - m) if share < 0.5 else g - momentum * (g - m)
    ahead = g + momentum * (m - g) if momentum < 0.5 else m - share * (m - g)
    return ahead if nesterov > 0 else m, m


def _finish(g, p, kept, rate):  # type: ignore[no-untyped-def]
    return (kept * p - rate * g,)


def _factors(group: Group, step: int) -> tuple[float, ...]:
    lr, momentum, matches = (
        float(group["lr"]),
        group["momentum"],
        group["adjust_lr_fn"] == "match_rms_adamw",
    )
    kept = 1 - lr * group["weight_decay"]
    products = *group["ns_coefficients"], group["ns_steps"], group["eps"]
    return momentum, 1 - momentum, group["nesterov"], kept, lr, matches, *products


def _parts(scalars: Scalars, shape: tuple[int, int]) -> MatrixParts:
    kept, lr, matches, a, b, c, steps, eps = scalars[4:]
    ratio = (
        0.2 * math.sqrt(max(shape))
        if matches
        else math.sqrt(max(1.0, shape[0] / shape[1]))
    )
    return MatrixParts(
        scalars[:4],
        (a, b, c),
        int(steps),
        eps,
        (np.float32(1), kept, np.float32(float(lr) * ratio)),
    )


def _check(group: Group) -> None:
    if group["momentum"] >= 1:
        raise EngineError(f"momentum is {group['momentum']}: it must be below 1")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise EngineError(
            f"adjust_lr_fn is {group['adjust_lr_fn']!r}: it must be one of "
            f"{_ADJUSTMENTS}"
        )
    if not 1 <= group["ns_steps"] < 100 or group["ns_steps"] != int(group["ns_steps"]):
        raise EngineError(
            f"ns_steps is {group['ns_steps']}: it must be a whole number from 1 to 99"
        )


register(
    UpdateRule(
        name="muon",
        title="Muon",
        moments=("momentum_buffer",),
        defaults={
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": (3.4445, -4.775, 2.0315),
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
        },
        formula=_formula,
        factors=_factors,
        check=_check,
        whole_update=WholeUpdate(
            parts=_parts,
            transform=orthogonalize,
            multiply=multiply,
            loops="ebbtide.features.matrices.compiled_matrices",
            finish=UpdateRule(
                "muon-finish", "Muon", (), {}, _finish, lambda group, step: (1.0, 0.0)
            ),
        ),
    )
)
