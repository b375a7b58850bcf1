"""Machines at a quantile of the uncertainty of their rates, for tests of ranges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import NormalDist
from typing import TypeVar

from ebbtide.machines.accuracy import uncertainty_of
from ebbtide.machines.machine import Box, Machine

_Rates = TypeVar("_Rates", Machine, Box)
# Keys whose values are times, not rates.
_TIMES = ("step_overhead_s", "operation_s")
# Rates that also have a total in `box`.
_SHARED = ("cpu_update_params_per_s", "host_memory_bytes_per_s")


def at_quantile(
    machine: Machine, quantile: float, keys: Iterable[str] | None = None
) -> Machine:
    """Return the machine with its rates at a quantile of their uncertainty.

    Errors are normal in the logarithm and all rates err in the same direction, which
    gives a wider range than independent errors do. At a low quantile rates are low and
    times (`step_overhead_s`, `operation_s`) long.

    Args:
        quantile: From 0 to 1, both excluded; 0.16 and 0.84 are one standard error from
            the rates as they are.
        keys: The rates to change; None: all with a known uncertainty.
    """
    deviations = NormalDist().inv_cdf(quantile)
    chosen = None if keys is None else set(keys)
    factors = {
        key: factor ** (-deviations if key in _TIMES else deviations)
        for key, factor in uncertainty_of(machine).items()
        if chosen is None or key in chosen
    }
    box = machine.box
    if box is not None:
        own = {key: factors[key] for key in _SHARED if key in factors}
        alone = {
            f"one_rank_{key}": factors.get(f"box.one_rank_{key}", factor)
            for key, factor in own.items()
        }
        box = _scaled(box, {**own, **alone})
    return replace(_scaled(machine, factors), box=box)


def _scaled(values: _Rates, factors: dict[str, float]) -> _Rates:
    """Return an object with its known values multiplied by the factors of their
    keys."""
    changed = {key: getattr(values, key, None) for key in factors}
    return replace(
        values,
        **{
            key: value * factors[key]
            for key, value in changed.items()
            if value is not None
        },
    )
