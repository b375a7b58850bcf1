"""The contract of update rules, and their registry."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np

from ebbtide.interleave.engine.errors import EngineError

# The factors of one step, each rounded once, from double to fp32. The first is that of the gradient.
Scalars = tuple[np.float32, ...]
Group = Mapping[str, Any]

RULES: dict[str, UpdateRule] = {}


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """An update of each element by itself, whose state is an fp32 master and fp32 moments. `register` adds it.

    Args:
        name: As `rule` of InterleavedOptimizer names it.
        title: The optimizer of torch or of a paper that has the same update, for messages.
        moments: The names of the moments in state dicts, in the order of the formula: one or two.
        defaults: Hyperparameters of a group, named as there, and their defaults.
        formula: Returns the new master and moments of (gradient, master, *moments, *factors), all fp32. NumPy, numba
            and Triton evaluate the same code, each operation as it stands. So it has no annotations, literals in
            comparisons only, and calls `divide`, `square_root` and `sign` of `arithmetic`.
        factors: Returns the factors of a step (counted from 1) for a group, in double precision.
        check: Raises EngineError if hyperparameters of a group, all finite numbers of at least 0, are not supported.
        unsupported: Options of that optimizer that must be off.
    """

    name: str
    title: str
    moments: tuple[str, ...]
    defaults: Group
    formula: Callable[..., Any] = field(repr=False)
    factors: Callable[[Group, int], tuple[float, ...]] = field(repr=False)
    check: Callable[[Group], None] = field(repr=False, default=lambda group: None)
    unsupported: tuple[str, ...] = ("maximize",)

    def scalars(self, group: Group, step: int, scale: float = 1.0) -> Scalars:
        """Return the factors of a step; `scale` is that of each gradient (clip factor times 1 / loss scale)."""
        return tuple(map(np.float32, (scale, *self.factors(group, step))))

    @property
    def rows(self) -> int:
        """Number of fp32 numbers in the state of a parameter."""
        return 1 + len(self.moments)

    def state_bytes(self, has_remainders: bool = False) -> int:
        """Return the bytes of state per parameter, with the master or with its remainder."""
        return 4 * len(self.moments) + (2 if has_remainders else 4)

    def formula_with(self, arithmetic: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the formula with other functions in place of `divide`, `square_root` and `sign`."""
        formula: Any = self.formula
        return FunctionType(formula.__code__, {**formula.__globals__, **arithmetic}, formula.__name__)

    def check_group(self, group: Group) -> None:
        """Check the hyperparameters of a group. Raises EngineError if one is not valid or not supported."""
        for name, default in self.defaults.items():
            if isinstance(default, bool):
                continue
            is_tuple = isinstance(default, tuple)
            try:
                values = tuple(map(float, group[name] if is_tuple else (group[name],)))
            except (TypeError, ValueError):
                values = ()
            if len(values) != (len(default) if is_tuple else 1):
                kind = f"{len(default)} numbers" if is_tuple else "a number"
                raise EngineError(f"{name} is {group[name]!r}: it must be {kind}")
            limit, words = (1.0, " and below 1") if name == "betas" else (math.inf, "")
            if not all(0 <= value < limit for value in values):
                raise EngineError(f"{name} is {group[name]}: it must be at least 0{words}")
        self.check(group)
        for name in self.unsupported:
            if group.get(name):
                raise EngineError(f"{name} is not supported: leave it off")


def register(rule: UpdateRule) -> UpdateRule:
    """Add a rule to those that `find_rule` finds."""
    RULES[rule.name] = rule
    return rule


def find_rule(name: str) -> UpdateRule:
    """Return the rule of a name. Raises EngineError if there is none."""
    if name not in RULES:
        raise EngineError(f"rule is {name!r}: it must be one of {', '.join(sorted(RULES))}")
    return RULES[name]
