"""The policies, one file each. Importing this package imports, and so registers, every module in it."""

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

__all__ = [
    "BUILT_IN",
    "POLICIES",
    "DefaultRun",
    "PlanBuilder",
    "Policy",
    "PolicyFunction",
    "PolicySpec",
    "depends_on_rates",
    "make_plan",
    "parse",
    "policy",
]
