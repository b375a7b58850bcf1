"""Corrects the rates of a machine by the measured times of a step."""

from __future__ import annotations

from dataclasses import replace

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
# The rates whose changes call for a new plan.
PLANNING_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", *_COMPUTE_RATES.values())


def correct_rates(machine: Machine, schedule: Schedule) -> Machine:
    """Correct the rates of a machine by a measured schedule.

    Each rate moves half the way, on a logarithmic scale, to the value with which a simulation of the plan takes the
    measured time on its resource. Rates are scaled by the ratio of simulated and measured times, so that the effect of
    operations that run at once and share a resource stays accounted for.

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
    measured_s: dict[str, float] = {}
    expected_s: dict[str, float] = {}
    for (op, start, end), (_, expected_start, expected_end) in zip(schedule.items(), predicted.items(), strict=True):
        key = _rate_name(op)
        # Fewer threads do not reach just their share of the rate.
        throttled = key == "cpu_update_params_per_s" and schedule.plan.cpu_share < 1
        if key is not None and not throttled:
            measured_s[key] = measured_s.get(key, 0.0) + end - start
            expected_s[key] = expected_s.get(key, 0.0) + expected_end - expected_start
    rates = {}
    for key, seconds in measured_s.items():
        rate = getattr(machine, key)
        if rate and seconds > 0 and expected_s[key] > 0:
            rates[key] = rate * (expected_s[key] / seconds) ** WEIGHT
    return replace(machine, **rates)


def _rate_name(op: Op) -> str | None:
    if op.resource in ("h2d", "d2h"):
        return f"{op.resource}_pageable_bytes_per_s" if op.pageable else f"{op.resource}_bytes_per_s"
    return _COMPUTE_RATES.get((op.kind, op.resource))
