"""Rules without masters, as torch runs its optimizers on bfloat16 parameters.

Moments are in bfloat16, 2 B for each parameter.
"""

from dataclasses import replace

import torch

from ebbtide.features.rules.adam import ADAM
from ebbtide.features.rules.sgd import SGD
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import Group, UpdateRule, register


def _register_pure(rule: UpdateRule) -> None:
    name = rule.name

    def factors(group: Group, step: int) -> tuple[float, ...]:
        # Moments are rounded to nearest.
        return *rule.factors(group, step), 0.0

    whole: UpdateRule = replace(
        rule, name=f"{name}-bf16", moment_dtype=torch.bfloat16, factors=factors
    )
    register(replace(whole, name=f"{name}-pure-bf16", has_masters=False, whole=whole))


for _rule in (ADAM, ADAMW, SGD):
    _register_pure(_rule)
