"""Holds a run to limits: how much more than another one it may use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.analysis.timeseries.statistics import sum_or_none
from ebbtide.errors import UserError
from ebbtide.features.diff.comparison import Change, Diff, TimeChange
from ebbtide.phases import ITERATION_PARTS

_LIMIT = re.compile(r"\s*(\w+)\s*>\s*(\d+(?:\.\d*)?)\s*%\s*")
_TIMES = ("iteration", *ITERATION_PARTS)
_COPIES = ("h2d_bytes", "d2h_bytes")
_PEAK = "peak_"
QUANTITIES = (
    f"{', '.join(_TIMES)}, {_PEAK}allocated, {_PEAK}POOL of any pool, "
    f"{', '.join(_COPIES)}"
)


@dataclass(frozen=True)
class Limit:
    """The share by which a quantity may grow."""

    quantity: str
    share: float

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Parse `iteration>5%`. Raises ValueError for anything else."""
        match = _LIMIT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a limit: write QUANTITY>SHARE%, like iteration>5%"
            )
        if match[1] not in (*_TIMES, *_COPIES) and not re.fullmatch(
            f"{_PEAK}.+", match[1]
        ):
            raise ValueError(f"{match[1]!r} is not a quantity; these are: {QUANTITIES}")
        return cls(match[1], float(match[2]) / 100)

    def __str__(self) -> str:
        return f"{self.quantity}>{100 * self.share:g}%"


@dataclass(frozen=True)
class LimitResult:
    """A quantity beside its limit."""

    limit: Limit
    a: float  # Of the first run: median ms, or bytes.
    b: float  # Of the second run.
    # The least growth b - a, with 95 % confidence; b - a itself of exact quantities.
    low: float
    is_exact: bool  # Whether the quantity has no spread: sizes, and times of dry runs.

    @property
    def share(self) -> float:
        """The growth as a share of a."""
        return self._share(self.b - self.a)

    @property
    def low_share(self) -> float:
        """The least growth as a share of a."""
        return self._share(self.low)

    def _share(self, growth: float) -> float:
        return (
            growth / self.a
            if self.a
            else math.copysign(math.inf, growth)
            if growth
            else 0.0
        )

    @property
    def fails(self) -> bool:
        """Whether the limit is passed."""
        return self.low_share > self.limit.share

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `failures` in `ebbtide diff --json`.

        Shares are null where a is 0.
        """
        shares = {"share": self.share, "low_share": self.low_share}
        finite = {
            key: value if math.isfinite(value) else None
            for key, value in shares.items()
        }
        return {
            "quantity": self.limit.quantity,
            "limit_share": self.limit.share,
            "a": self.a,
            "b": self.b,
        } | finite


def results(diff: Diff, limits: Sequence[Limit]) -> list[LimitResult]:
    """Compare the growth of quantities with their limits. Raises UserError where one is
    not known in both runs."""
    return [_result(diff, limit) for limit in limits]


def _result(diff: Diff, limit: Limit) -> LimitResult:
    by_name = {change.name: change for change in _quantities(diff)}
    change = by_name.get(limit.quantity, Change(limit.quantity, None, None))
    if change.a is None or change.b is None or change.difference is None:
        names = ", ".join(
            name for name, entry in by_name.items() if entry.difference is not None
        )
        path = diff.a if change.a is None else diff.b
        raise UserError(
            f"{limit}: {limit.quantity} of {path} is not known; both have "
            f"{names or 'no quantity'}"
        )
    if not isinstance(change, TimeChange) or all(diff.predicted):
        return LimitResult(limit, change.a, change.b, change.difference, is_exact=True)
    if change.limit_interval is None:
        raise UserError(
            f"{limit}: times cannot be compared with fewer than three counted "
            "iterations in each run"
        )
    return LimitResult(
        limit, change.a, change.b, change.limit_interval.low, is_exact=False
    )


def _quantities(diff: Diff) -> Iterator[Change]:
    yield from diff.median_ms
    for change in diff.peak_bytes:
        yield Change(_PEAK + change.name, change.a, change.b)
    for name in _COPIES:
        phases = getattr(diff, name)
        yield Change(
            name,
            sum_or_none(phase.a for phase in phases),
            sum_or_none(phase.b for phase in phases),
        )
