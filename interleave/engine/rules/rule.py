"""The contract of update rules, and their registry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.units import counted

# The name of masters in state dicts and recordings.
MASTER_NAME = "master"

# The factors of one step, each rounded once, from double to fp32. The first is the
# gradient's factor.
Scalars = tuple[np.float32, ...]
Group = Mapping[str, Any]

# Elements of a parameter, in the order of its memory, whose 8-bit moments have a common
# scale.
BLOCK = 256


class UpdateRange(NamedTuple):
    """Elements of tensors, from `begin` to the one before `end`, that are updated with
    the same factors.

    `position` is the first element's position, for rules that round (see
    `numerics.rounding`); `shape` the parameter's shape, for rules that update whole
    ones; `block` is the first block, for moments in 8 bits.
    """

    begin: int
    end: int
    scalars: Scalars
    position: int = 0
    shape: tuple[int, int] | None = None
    block: int = 0


class WholeUpdate(NamedTuple):
    """An update that transforms a whole parameter of two dimensions, besides the
    formula for each element.

    Attributes:
        parts: Returns the parts of the factors, for a shape: `scalars` are for the
            formula, `finish_scalars` for `finish`, the others for `transform`.
        transform: Replaces the first result of the formula, flat: (values, shape,
            parts, multiply, sum of squares).
        multiply: Returns the product of two arrays.
        loops: The module of its compiled form, `multiply`, and of `ROWS`, the rows that
            are computed together.
        finish: The rule, without moments, that takes the result as its gradient.
    """

    parts: Callable[[Scalars, tuple[int, int]], Any]
    transform: Callable[..., None]
    multiply: Callable[[Any, Any], Any]
    loops: str
    finish: UpdateRule


class ScaledMoments(NamedTuple):
    """Moments in 8 bits, with a scale for each block of `BLOCK` elements.

    Attributes:
        names: The names of the scales in state dicts, of each moment.
        values: The numbers of the codes of each moment.
        middles: The middles between them.
        constants: What entries of state dicts have besides, the same for all
            parameters.
        widen: Returns a moment in fp32: (codes, scales, number of the moment).
        quantize: Returns codes and scales: (moment, number of the moment).
        loops: The module of the compiled update, `update_of(rule)`.
    """

    names: tuple[str, ...]
    values: Sequence[Any]
    middles: Sequence[Any]
    constants: Mapping[str, Any]
    widen: Callable[[Any, Any, int], Any]
    quantize: Callable[[Any, int], tuple[Any, Any]]
    loops: str


class SplitMaster(NamedTuple):
    """fp32 masters in two parts.

    One is the parameter, the other further bits in a row of the state.

    `loops` is a module that numba compiles, and `kernels` one for Triton; both have
    functions `join` and `split`."""

    name: str  # As `Workload.master` has it.
    dtype: torch.dtype  # Of the row.
    param_dtype: torch.dtype
    # Returns both parts of masters, on the CPU.
    split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    # Returns the masters of both parts.
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    loops: str
    kernels: str


class UpdateInputs(NamedTuple):
    """A state with its masters, the parameter to write, and the rule.

    The rule updates them. A parameter of None is the master.
    """

    state: tuple[torch.Tensor, ...]
    out: torch.Tensor | None
    rule: UpdateRule


RULES: dict[str, UpdateRule] = {}


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """An update whose state is an fp32 master and moments for each element. `register`
    adds it.

    Args:
        name: As `rule` of InterleavedOptimizer names it.
        title: The optimizer of torch or of a paper that has the same update, for
            messages.
        moments: The names of the moments in state dicts, in the order of the formula:
            one or two.
        defaults: Hyperparameters of a group, named as there, and their defaults.
        formula: Returns the new master and moments of (gradient, master, *moments,
            *factors), all fp32. NumPy, numba and Triton evaluate the same code, each
            operation as it stands. So it has no annotations, literals in comparisons
            only, and calls `divide`, `square_root` and `sign` of `arithmetic`.
        factors: Returns the factors of a step (counted from 1) for a group, in double
            precision.
        check: Raises EngineError if hyperparameters of a group, all finite numbers of
            at least 0, are not supported.
        unsupported: Options of that optimizer that must be off.
        moment_dtype: float32, bfloat16 or uint8. The formula has fp32 moments in all
            cases. With bfloat16 the last factor of a step is not for it, but the seed
            of `numerics.rounding`, or 0 to round to nearest.
        scaled: With uint8, how moments are scaled.
        whole_update: How whole parameters are updated; None if each element is for
            itself.
        has_masters: Whether the state has a row of masters; without one the parameters
            are the masters.
        split: How that row has a part of the masters only; None if it has fp32 masters.
        whole: The same rule with a row of fp32 masters; None for a rule that has
            one.
    """

    name: str
    title: str
    moments: tuple[str, ...]
    defaults: Group
    formula: Callable[..., Any] = field(repr=False)
    factors: Callable[[Group, int], tuple[float, ...]] = field(repr=False)
    check: Callable[[Group], None] = field(repr=False, default=lambda group: None)
    unsupported: tuple[str, ...] = ("maximize", "differentiable")
    moment_dtype: torch.dtype = torch.float32
    scaled: ScaledMoments | None = field(repr=False, default=None)
    whole_update: WholeUpdate | None = field(repr=False, default=None)
    has_masters: bool = True
    split: SplitMaster | None = None
    whole: UpdateRule | None = field(repr=False, default=None)

    @property
    def scales(self) -> tuple[str, ...]:
        """The names of the scales of moments in state dicts.

        There are none but for moments in 8 bits.
        """
        return () if self.scaled is None else self.scaled.names

    @property
    def ending(self) -> UpdateRule:
        """The rule of the end of an update: `finish` where whole parameters are
        updated, else this rule."""
        return self if self.whole_update is None else self.whole_update.finish

    @property
    def with_masters(self) -> UpdateRule:
        """The rule with a row of fp32 masters."""
        return self.whole or self

    @cached_property
    def without_masters(self) -> UpdateRule:
        """The rule of fp32 parameters, which are their own masters unless whole ones
        are updated."""
        if (
            self.split is not None
            or self.whole_update is not None
            or not self.has_masters
        ):
            return self
        return replace(self, has_masters=False, whole=self.with_masters)

    def inputs(self, rows: Sequence[torch.Tensor], param: torch.Tensor) -> UpdateInputs:
        """Return what an update takes for a parameter and the rows of its state.

        The masters come first.
        """
        if self.has_masters:
            return UpdateInputs(tuple(rows), param, self)
        return UpdateInputs((param, *rows), None, self.with_masters)

    @property
    def saved(self) -> UpdateRule:
        """The rule whose rows state dicts have."""
        return self if self.split is None else self.with_masters

    @property
    def master(self) -> str:
        """The place of the masters: `fp32` in the state, `parameter`, or the kind of
        `split`."""
        if self.split is not None:
            return self.split.name
        return "fp32" if self.has_masters else "parameter"

    @property
    def reads_params(self) -> bool:
        """Whether an update reads the parameters, as the state has only a part of the
        masters, or none."""
        return self.split is not None or not self.has_masters

    def scalars(self, group: Group, step: int, scale: float = 1.0) -> Scalars:
        """Return the factors of a step.

        `scale` is each gradient's scale (clip factor times 1 / loss scale).
        """
        return tuple(map(np.float32, (scale, *self.factors(group, step))))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the rows of a state.

        Rows are masters, or their part, moments, and scales of moments.
        """
        master = torch.float32 if self.split is None else self.split.dtype
        masters = (master,) if self.has_masters else ()
        return (
            *masters,
            *(self.moment_dtype for _ in self.moments),
            *(torch.float32 for _ in self.scales),
        )

    def row_slices(self, begin: int, end: int, block: int) -> tuple[slice, ...]:
        """Return the part of each row for elements from `begin` to the one before
        `end`, in blocks from `block`."""
        blocks = slice(block, block - (begin - end) // BLOCK)
        return (slice(begin, end),) * (self.has_masters + len(self.moments)) + (
            blocks,
        ) * len(self.scales)

    def zero_rows(self, params: int) -> tuple[torch.Tensor, ...]:
        """Return the rows of the state of a flat parameter, on the host, all 0."""
        lengths = (part.stop for part in self.row_slices(0, params, 0))
        pairs = zip(lengths, self.dtypes, strict=True)
        return tuple(
            torch.zeros(size, dtype=dtype, device="cpu") for size, dtype in pairs
        )

    @property
    def state_bytes(self) -> float:
        """Bytes of state per parameter."""
        nbytes = sum(
            dtype.itemsize
            for dtype in self.dtypes[: self.has_masters + len(self.moments)]
        )
        return float(nbytes + torch.float32.itemsize * len(self.scales) / BLOCK)

    @property
    def row_names(self) -> tuple[str, ...]:
        """The names of the rows of a state in state dicts and recordings."""
        return (
            *((MASTER_NAME,) if self.has_masters else ()),
            *self.moments,
            *self.scales,
        )

    @property
    def rounds(self) -> bool:
        """Whether moments are rounded to bfloat16.

        The rounding may depend on the position of their element.
        """
        return bool(self.moment_dtype == torch.bfloat16)

    @property
    def has_ranges(self) -> bool:
        """Whether an update needs to know where parameters begin.

        Their ranges are then not merged.
        """
        return self.rounds or bool(self.scales) or self.whole_update is not None

    def formula_with(self, arithmetic: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the formula with other functions in the places of `divide`,
        `square_root` and `sign`."""
        formula: Any = self.formula
        return FunctionType(
            formula.__code__, {**formula.__globals__, **arithmetic}, formula.__name__
        )

    def check_group(self, group: Group) -> None:
        """Check the hyperparameters of a group. Raises EngineError if one is not valid
        or not supported."""
        for name, default in self.defaults.items():
            if isinstance(default, bool) and not isinstance(group[name], bool | int):
                raise EngineError(
                    f"{name} is {group[name]!r}: it must be True or False"
                )
            if default is None or isinstance(default, bool):
                continue
            is_tuple = isinstance(default, tuple)
            try:
                stated = group[name] if is_tuple else (group[name],)
                values = tuple(
                    float(value) for value in stated if not isinstance(value, str)
                )
            except (TypeError, ValueError):
                values = ()
            if len(values) != (len(default) if is_tuple else 1):
                kind = f"{len(default)} numbers" if is_tuple else "a number"
                raise EngineError(f"{name} is {group[name]!r}: it must be {kind}")
            if min(default if is_tuple else (default,)) < 0:
                # Its sign has a meaning.
                continue
            limit, words = (1.0, " and below 1") if name == "betas" else (math.inf, "")
            if not all(0 <= value < limit for value in values):
                raise EngineError(
                    f"{name} is {group[name]}: it must be at least 0{words}"
                )
        self.check(group)
        for name in self.unsupported:
            if group.get(name):
                raise EngineError(f"{name} is not supported: leave it off")


# Options of torch's optimizers that choose how they compute, not what.
_OF_KERNELS = {"foreach", "fused", "capturable"}


class GroupRules:
    """The rules of parameter groups.

    A group has the rule of its key `rule`; other groups have `default` with these
    defaults. Options of torch's optimizers that choose kernels have no effect, as in a
    group.

    Raises EngineError if there is no such rule or hyperparameter."""

    def __init__(self, default: str, hyperparameters: Group) -> None:
        self.default = find_rule(default)
        names = self.default.defaults
        if (
            unknown := hyperparameters.keys()
            - names.keys()
            - _OF_KERNELS
            - {*self.default.unsupported}
        ):
            raise EngineError(
                f"{min(unknown)} is no hyperparameter of {default}: these are "
                f"{', '.join(names)}"
            )
        self.default.check_group({**names, **hyperparameters})
        self.defaults = {
            name: hyperparameters.get(name, value) for name, value in names.items()
        }

    def rule_of(self, group: Group) -> UpdateRule:
        """Return the rule of a group."""
        return find_rule(group["rule"]) if "rule" in group else self.default

    def checked(self, group: Group) -> dict[str, Any]:
        """Return a group with the defaults of its rule. Raises EngineError if a
        hyperparameter is not valid."""
        rule = self.rule_of(group)
        whole = {**(self.defaults if rule is self.default else rule.defaults), **group}
        rule.check_group(whole)
        return whole

    def drop_other_defaults(self, group: dict[str, Any]) -> None:
        """Remove defaults of the optimizer from groups with another rule.

        Torch has added them.
        """
        for name in self.defaults.keys() - self.rule_of(group).defaults.keys():
            del group[name]

    def by_param(self, groups: Iterable[Group]) -> dict[torch.Tensor, UpdateRule]:
        """Return the rule of each parameter; fp32 parameters are their own masters."""
        rule_of = {}
        for group in groups:
            rule = self.rule_of(group)
            for param in group["params"]:
                rule_of[param] = (
                    rule.without_masters if param.dtype == torch.float32 else rule
                )
        return rule_of


def register(rule: UpdateRule) -> UpdateRule:
    """Add a rule to those that `find_rule` finds. Raises EngineError for a rule without
    moments, or whose formula returns something else than master and moments."""
    if not rule.moments:
        raise EngineError(
            f"the rule {rule.name} has no moments: state needs at least one, which a "
            "formula may pass on"
        )
    _check_results(rule)
    RULES[rule.name] = rule
    return rule


def _check_results(rule: UpdateRule) -> None:
    formula: Any = rule.formula
    ones = (np.float32(1),) * formula.__code__.co_argcount
    with np.errstate(all="ignore"):
        results = formula(*ones)
    count = len(results) if isinstance(results, tuple) else 1
    if count != 1 + len(rule.moments):
        raise EngineError(
            f"the formula of the rule {rule.name} returns {counted(count, 'value')}: "
            f"it must return a tuple, (master, {', '.join(rule.moments)})"
        )


def find_rule(name: str) -> UpdateRule:
    """Return the rule of a name. Raises EngineError if there is none."""
    if name not in RULES:
        raise EngineError(
            f"rule is {name!r}: it must be one of {', '.join(sorted(RULES))}"
        )
    return RULES[name]
