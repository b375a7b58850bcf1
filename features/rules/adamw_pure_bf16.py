"""AdamW without masters, as torch runs it on bfloat16 parameters.

State is in bfloat16, 4 B for each parameter.
"""

from dataclasses import replace

from ebbtide.features.rules.adamw_bf16 import ADAMW_BF16
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import Group, register


def _factors(group: Group, step: int) -> tuple[float, ...]:
    # Moments are rounded to nearest.
    return *ADAMW.factors(group, step), 0.0


register(
    replace(
        ADAMW_BF16,
        name="adamw-pure-bf16",
        defaults=ADAMW.defaults,
        factors=_factors,
        has_masters=False,
        whole=ADAMW_BF16,
    )
)
