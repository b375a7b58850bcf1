"""Rates of a machine that schedules show.

A running job corrects its rates by the schedules of its steps.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ebbtide import seams
from ebbtide.errors import UserError
from ebbtide.interleave.model.plan import Op
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

# Weight of the last step against the earlier ones.
WEIGHT = 0.5
_COMPUTE_RATES = {
    ("update", "cpu"): "cpu_update_params_per_s",
    ("update", "gpu"): "gpu_update_params_per_s",
    ("cast", "cpu"): "cpu_cast_params_per_s",
}
_PLANNING_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", *_COMPUTE_RATES.values())


@dataclass(frozen=True)
class ObservedRates:
    """A group of rates of a machine, by name: what the seam `rates` takes.

    Attributes:
        planning: Returns the rates of a machine whose changes call for a new plan.
        observed: Returns the rates that a schedule shows on a machine; none that it
            does not show.
        scaled: Returns a machine whose rates of the group are multiplied by factors, by
            name.
    """

    planning: Callable[[Machine], dict[str, float | None]]
    observed: Callable[[Schedule, Machine], dict[str, float]]
    scaled: Callable[[Machine, Mapping[str, float]], Machine]


def planning_rates(machine: Machine) -> dict[str, float | None]:
    """Return the rates of a machine, by name, whose changes call for a new plan."""
    rates: dict[str, float | None] = {}
    for group in _groups():
        rates |= group.planning(machine)
    return rates


def correct_rates(machine: Machine, schedule: Schedule) -> Machine:
    """Correct the rates of a machine by the measured schedule of a step.

    Do not correct them if the step's plan cannot be simulated on the machine.

    Each rate moves half the way, on a logarithmic scale, to where a simulation shows
    the rate that was measured.
    """
    try:
        predicted = simulate(schedule.plan, schedule.workload, machine)
    except UserError:
        return machine
    corrected = machine
    for group in _groups():
        expected = group.planning(machine) | group.observed(predicted, machine)
        factors = {
            name: (rate / before) ** WEIGHT
            for name, rate in group.observed(schedule, machine).items()
            if (before := expected.get(name))
        }
        corrected = group.scaled(corrected, factors)
    return corrected


@cache
def _groups() -> Sequence[ObservedRates]:
    return _LINK_AND_COMPUTE, *seams.load_all("rates")


def _planning(machine: Machine) -> dict[str, float | None]:
    return {name: getattr(machine, name) for name in _PLANNING_RATES}


def _observed(schedule: Schedule, machine: Machine) -> dict[str, float]:
    """Return the rates of copies, and of updates and casts that all threads work at."""
    work: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for op, start, end in schedule.items():
        name = _rate_of(op, schedule.plan.cpu_share)
        if name is not None:
            work[name] += op.nbytes or op.params
            seconds[name] += end - start
    return {
        name: amount / seconds[name]
        for name, amount in work.items()
        if amount and seconds[name] > 0
    }


def _rate_of(op: Op, cpu_share: float) -> str | None:
    """Return the name of the rate that an operation shows."""
    if op.resource in ("h2d", "d2h"):
        return (
            f"{op.resource}_pageable_bytes_per_s"
            if op.pageable
            else f"{op.resource}_bytes_per_s"
        )
    name = _COMPUTE_RATES.get((op.kind, op.resource))
    # Fewer threads do not reach just their share of the rate.
    return None if name == "cpu_update_params_per_s" and cpu_share < 1 else name


def _scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    rates = {name: rate for name in factors if (rate := getattr(machine, name))}
    return replace(
        machine, **{name: rate * factors[name] for name, rate in rates.items()}
    )


_LINK_AND_COMPUTE = ObservedRates(_planning, _observed, _scaled)
