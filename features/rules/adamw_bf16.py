"""AdamW with moments in bfloat16, rounded to nearest or stochastically."""

from dataclasses import replace

import torch

from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import Group, register


def _factors(group: Group, step: int) -> tuple[float, ...]:
    # fp32 has this integer exactly.
    seed = step % 2**24 or 2**24
    return *ADAMW.factors(group, step), float(
        seed if group["stochastic_rounding"] else 0
    )


ADAMW_BF16 = register(
    replace(
        ADAMW,
        name="adamw-bf16",
        defaults={**ADAMW.defaults, "stochastic_rounding": True},
        factors=_factors,
        moment_dtype=torch.bfloat16,
    )
)
