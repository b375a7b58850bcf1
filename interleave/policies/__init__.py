"""The policies, a file for each or for those alike. Importing this package imports, and so registers, all of them."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from ebbtide import seams
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import (
    POLICIES,
    DefaultRun,
    Policy,
    PolicyFunction,
    PolicySpec,
    SystemRun,
    depends_on_rates,
    make_plan,
    moves_layers,
    parse,
    policy,
    refuse_simulation_only,
)

RunKind = TypeVar("RunKind", DefaultRun, SystemRun)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
seams.load_all("policies")


def _runs(kind: type[RunKind]) -> list[RunKind]:
    """Return the runs of a kind of all policies in their order."""
    runs = (registered.run for registered in POLICIES.values())
    return sorted((run for run in runs if isinstance(run, kind)), key=lambda run: run.position)


# The policies that are replayed if the user names none.
BUILT_IN = tuple(run.text for run in _runs(DefaultRun))
# Other systems with typical values (`systems` stands for all of them), and as they run today.
SYSTEMS = tuple(run.text for run in _runs(SystemRun))
ADVISED_SYSTEMS = tuple(
    text for run in _runs(SystemRun) for text in ((run.text,) if run.advised is None else run.advised)
)
ALL_SYSTEMS = "systems"


def with_systems(policies: Iterable[str]) -> list[str]:
    """Return policies' strings with `systems` replaced by those of all other systems."""
    return [text for policy in policies for text in (SYSTEMS if policy.strip() == ALL_SYSTEMS else (policy,))]


__all__ = [
    "ADVISED_SYSTEMS",
    "ALL_SYSTEMS",
    "BUILT_IN",
    "POLICIES",
    "SYSTEMS",
    "DefaultRun",
    "PlanBuilder",
    "Policy",
    "PolicyFunction",
    "PolicySpec",
    "SystemRun",
    "depends_on_rates",
    "make_plan",
    "moves_layers",
    "parse",
    "policy",
    "refuse_simulation_only",
    "with_systems",
]
