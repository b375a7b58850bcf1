"""Corrects the rates of a machine by the measured times of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from ebbtide.errors import UserError
from ebbtide.interleave.model.plan import Op
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.machines.storage import StoragePath

_Rates = TypeVar("_Rates", Machine, StoragePath)

# Weight of the last step against the earlier ones.
WEIGHT = 0.5
_COMPUTE_RATES = {
    ("update", "cpu"): "cpu_update_params_per_s",
    ("update", "gpu"): "gpu_update_params_per_s",
    ("cast", "cpu"): "cpu_cast_params_per_s",
}
# The rates whose changes call for a new plan, besides those of storage.
_PLANNING_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", *_COMPUTE_RATES.values())
_STORAGE_RATES = {"storage_read": "read_bytes_per_s", "storage_write": "write_bytes_per_s"}
_STORAGE_DUPLEX = "duplex_bytes_per_s"


def planning_rates(machine: Machine) -> dict[str, float | None]:
    """Return the rates of a machine, by name, whose changes call for a new plan."""
    rates = {name: getattr(machine, name) for name in _PLANNING_RATES}
    for number, path in enumerate(machine.storage):
        rates |= {f"storage[{number}].{name}": getattr(path, name) for name in _STORAGE_RATES.values()}
    return rates


def correct_rates(machine: Machine, schedule: Schedule) -> Machine:
    """Correct the rates of a machine by a measured schedule.

    Each rate moves half the way, on a logarithmic scale, to the value with which a simulation of the plan takes the
    measured time on its resource. Rates are scaled by the ratio of simulated and measured times, so that the effect of
    operations that run at once and share a resource stays accounted for. What a path of the storage reads and writes
    together is scaled by the ratio of both.

    Args:
        machine: The rates so far.
        schedule: The measured schedule of a step.

    Returns:
        The machine with corrected rates; the same machine if the plan cannot be simulated on it.
    """
    try:
        predicted = simulate(schedule.plan, schedule.workload, machine)
    except UserError:
        return machine
    # By name and, for those of storage, path.
    measured_s: dict[tuple[str, int | None], float] = {}
    expected_s: dict[tuple[str, int | None], float] = {}
    for (op, start, end), (_, expected_start, expected_end) in zip(schedule.items(), predicted.items(), strict=True):
        for key in _rates_of(op, schedule.plan.cpu_share):
            measured_s[key] = measured_s.get(key, 0.0) + end - start
            expected_s[key] = expected_s.get(key, 0.0) + expected_end - expected_start
    factors = {
        key: (expected_s[key] / seconds) ** WEIGHT
        for key, seconds in measured_s.items()
        if seconds > 0 and expected_s[key] > 0
    }
    storage = [
        _scaled(path, {name: factor for (name, owner), factor in factors.items() if owner == number})
        for number, path in enumerate(machine.storage)
    ]
    own_factors = {name: factor for (name, owner), factor in factors.items() if owner is None}
    return replace(_scaled(machine, own_factors), storage=tuple(storage))


def _scaled(rates: _Rates, factors: Mapping[str, float]) -> _Rates:
    """Return rates times factors, by name; rates that are not known stay so."""
    return replace(rates, **{name: rate * factor for name, factor in factors.items() if (rate := getattr(rates, name))})


def _rates_of(op: Op, cpu_share: float) -> list[tuple[str, int | None]]:
    """Return the names of the rates that an operation shows, and the path of the storage that has them."""
    if op.resource in _STORAGE_RATES:
        return [(_STORAGE_RATES[op.resource], op.path), (_STORAGE_DUPLEX, op.path)]
    if op.resource in ("h2d", "d2h"):
        return [(f"{op.resource}_pageable_bytes_per_s" if op.pageable else f"{op.resource}_bytes_per_s", None)]
    name = _COMPUTE_RATES.get((op.kind, op.resource))
    # Fewer threads do not reach just their share of the rate.
    if name is None or (name == "cpu_update_params_per_s" and cpu_share < 1):
        return []
    return [(name, None)]
