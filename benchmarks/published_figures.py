"""Published figures beside simulated ones, and rates that are fitted to some of
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine

_STEPS = 40


@dataclass(frozen=True)
class Figure:
    """A published figure and what is simulated for it.

    Attributes:
        system: The system.
        what: The figure in words.
        unit: Its unit.
        published: The published value.
        simulated: The simulated value.
        is_fitted: Whether a rate was fitted to it, so that it proves nothing.
        reason: Why the simulated value is far from the published one.
    """

    system: str
    what: str
    unit: str
    published: float
    simulated: float
    is_fitted: bool = False
    reason: str = ""


def box(name: str) -> Machine:
    """Return a preset without its limit of host memory, which a fitted rate of the CPU
    includes."""
    return replace(
        preset(name), host_memory_bytes_per_s=1e13, duplex_bytes_per_s=None, box=None
    )


def fitted_rate(seconds: Callable[[float], float], published_s: float) -> float:
    """Return the rate, from 1e6 to 1e12 a second, at which what takes less time at a
    higher rate takes as long as published."""
    low, high = 1e6, 1e12
    for _ in range(_STEPS):
        rate = (low * high) ** 0.5
        if seconds(rate) > published_s:
            low = rate
        else:
            high = rate
    return high
