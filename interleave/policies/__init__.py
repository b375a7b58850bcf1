"""The policies, a file for each or for those alike. Importing this package imports, and
so registers, all of them."""

from collections.abc import Iterable
from importlib import import_module
from itertools import chain
from pkgutil import iter_modules
from typing import TypeVar

from ebbtide import seams
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import (
    POLICIES,
    DefaultRun,
    Policy,
    PolicyFunction,
    RegisteredPolicy,
    SystemRun,
    as_policy,
    make_plan,
    policy,
)

RunKind = TypeVar("RunKind", DefaultRun, SystemRun)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
seams.load_all("policies")


def _runs(kind: type[RunKind]) -> list[RunKind]:
    """Return the runs of a kind of all policies in their order."""
    runs = (registered.run for registered in POLICIES.values())
    return sorted(
        (run for run in runs if isinstance(run, kind)), key=lambda run: run.position
    )


# The policies that are replayed if the user names none.
BUILT_IN = tuple(run.text for run in _runs(DefaultRun))
# Other systems with typical values (`systems` stands for all of them), and as they run
# today.
SYSTEMS = tuple(run.text for run in _runs(SystemRun))
_advised = [
    (run.text,) if run.advised is None else run.advised for run in _runs(SystemRun)
]
ADVISED_SYSTEMS = tuple(map(as_policy, chain.from_iterable(_advised)))
ALL_SYSTEMS = "systems"


def as_policies(policies: Iterable[Policy | str]) -> list[Policy]:
    """Return policies from their texts as users write them.

    `systems` stands for all other systems.

    Raises PolicyError as `Policy.parse`."""
    parsed: list[Policy] = []
    for one in policies:
        is_all = isinstance(one, str) and one.strip() == ALL_SYSTEMS
        parsed += map(as_policy, SYSTEMS if is_all else (one,))
    return parsed


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
    "RegisteredPolicy",
    "SystemRun",
    "as_policies",
    "as_policy",
    "make_plan",
    "policy",
]
