"""The policies, one file each. Importing this package imports, and so registers, every module in it."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import (
    POLICIES,
    DefaultRun,
    Policy,
    PolicyFunction,
    PolicySpec,
    depends_on_rates,
    make_plan,
    parse,
    policy,
    refuse_simulation_only,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

# The policies that are replayed if the user names none.
BUILT_IN = tuple(
    run.text
    for run in sorted(
        (registered.default_run for registered in POLICIES.values() if registered.default_run is not None),
        key=lambda run: run.position,
    )
)

# The other systems, with typical values; `systems` stands for all of them where policies are asked for.
SYSTEMS = (
    "superoffload",
    "zenflow:0.1",
    "megatron-hybrid:0.5,overlap=copies",
    "deepcompile",
    "prime-rl",
    "torchao",
    "fsdp2-offload",
    "zero-infinity:12,pipeline_read=true,pipeline_write=true",
    "mlp-offload",
)
ALL_SYSTEMS = "systems"


def with_systems(policies: Iterable[str]) -> list[str]:
    """Return policies' strings with `systems` replaced by those of all other systems."""
    return [text for policy in policies for text in (SYSTEMS if policy.strip() == ALL_SYSTEMS else (policy,))]


__all__ = [
    "ALL_SYSTEMS",
    "BUILT_IN",
    "POLICIES",
    "SYSTEMS",
    "DefaultRun",
    "PlanBuilder",
    "Policy",
    "PolicyFunction",
    "PolicySpec",
    "depends_on_rates",
    "make_plan",
    "parse",
    "policy",
    "refuse_simulation_only",
    "with_systems",
]
