"""The range of an iteration: uncertain rates and times, each varied alone, combined as independent errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.provisioning.compute_times import DEVIATIONS_OF_RANGE
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.accuracy import uncertainty_of
from ebbtide.machines.machine import Machine

# Updates of published runs were predicted within about this factor by machines fitted to others (docs/validation.md).
_MODEL_FACTOR = 1.02
# Policies whose updates consist of the same operations.
_SAME_OPERATIONS = {"twin-flow": "zero-offload"}


@dataclass(frozen=True)
class IterationRange:
    """An iteration time and the range that has it with a probability of 80 %, seconds."""

    low_s: float
    likely_s: float
    high_s: float


def iteration_range(schedule: Schedule, machine: Machine, compute_factor: float) -> IterationRange:
    """Return the range of a schedule's iteration.

    Each rate with a known uncertainty is set one standard error lower and higher, and so are the times of the compute,
    and the same plan is simulated again. Changes of the logarithm of the iteration are summed as squares, longer and
    shorter ones apart, and extended to the 10th and the 90th percentile. If the machine was fitted to runs of the same
    policy, its rates together are known better than each of them: the residuals of the fit count instead.

    Args:
        schedule: The schedule with the most likely values.
        machine: The machine it was simulated on.
        compute_factor: The factor within which the times of forward, backward and other are known.
    """
    likely = schedule.iteration_s
    if likely <= 0:
        return IterationRange(likely, likely, likely)
    squares = {True: math.log(_MODEL_FACTOR) ** 2, False: math.log(_MODEL_FACTOR) ** 2}
    for iteration_s in _varied(schedule, machine, compute_factor):
        change = math.log(iteration_s / likely)
        squares[change > 0] += change**2
    shorter, longer = (math.exp(DEVIATIONS_OF_RANGE * math.sqrt(squares[side])) for side in (False, True))
    return IterationRange(likely / shorter, likely, likely * longer)


def residual_factor(policy: str, machine: Machine) -> float | None:
    """Return the factor within which the fit of a machine explains updates under a policy: root mean square.

    Returns:
        None if the machine was not fitted to runs of a policy with the same operations.
    """
    about = machine.extra.get("fit")
    policies, residuals = (about.get(key) if isinstance(about, dict) else None for key in ("policies", "residuals"))
    if not isinstance(policies, dict) or not isinstance(residuals, dict):
        return None
    name, blocks = _operations(policy)
    fitted = {_operations(text) for text in policies.values() if isinstance(text, str)}
    errors = [float(value) for value in residuals.values() if isinstance(value, int | float)]
    # Blocking copies of gradients are operations of their own; the update after them is the same.
    if not errors or not any(other == name and (other_blocks or not blocks) for other, other_blocks in fitted):
        return None
    return 1 + max(_MODEL_FACTOR - 1, math.sqrt(sum(error**2 for error in errors) / len(errors)))


def _operations(text: str) -> tuple[str, bool]:
    """Return what the operations of a policy follow from: its name, and whether copies of gradients block."""
    name = text.partition(",")[0].partition(":")[0]
    return _SAME_OPERATIONS.get(name, name), "grads=blocking" in text


def _varied(schedule: Schedule, machine: Machine, compute_factor: float) -> Iterator[float]:
    """Yield the iteration with each uncertain value one standard error lower and higher."""
    workload = schedule.workload
    factor = residual_factor(schedule.plan.policy, machine)
    if factor is not None:
        yield schedule.iteration_s + schedule.exposed_s * (factor - 1)
        yield schedule.iteration_s - schedule.exposed_s * (1 - 1 / factor)
    for key, error in uncertainty_of(machine).items() if factor is None else ():
        value = getattr(machine, key, None)
        if isinstance(value, int | float) and value:
            for changed in (value * error, value / error):
                changes: dict[str, Any] = {key: changed}
                yield simulate(schedule.plan, workload, replace(machine, **changes)).iteration_s
    for scale in (compute_factor, 1 / compute_factor):
        scaled = replace(
            workload,
            forward_s=workload.forward_s * scale,
            backward_s=workload.backward_s * scale,
            other_s=workload.other_s * scale,
        )
        yield simulate(schedule.plan, scaled, machine).iteration_s
