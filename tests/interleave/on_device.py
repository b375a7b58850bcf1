"""An independent count of the plan's device memory: subgroup by subgroup, on a fine
grid of times."""

from __future__ import annotations

import numpy as np

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import value_at

# (from s, to s, bytes)
Stay = tuple[float, float, float]


def stays(schedule: Schedule) -> list[Stay]:
    """Return when state and gradients are on the device: (from s, to s, bytes) for each
    stay."""
    workload, plan = schedule.workload, schedule.plan
    times = {
        (op.kind, op.subgroup): (start, end) for op, start, end in schedule.items()
    }
    length = schedule.iteration_s
    result: list[Stay] = []
    remaining = workload.params
    for subgroup, size in enumerate(workload.subgroups):
        state, gradient = size * workload.state_bytes, size * workload.grad_bytes
        if subgroup in plan.resident:
            result.append((0.0, length, state + 4 * size * plan.has_gradient_buffers))
        elif subgroup in plan.parked:
            result.append((0.0, times["flush", subgroup][1], state))
            result.append((times["fetch", subgroup][0], length, state))
        elif ("fetch", subgroup) in times:
            result.append(
                (times["fetch", subgroup][0], times["flush", subgroup][1], state)
            )
        has_own = plan.has_gradient_buffers or workload.gradients_held_until_step
        if subgroup in plan.kept_gradients and not has_own:
            # The backward computes gradients in reverse, at a constant rate. It starts
            # one when the next one is ready.
            start = (
                schedule.other_s
                + schedule.forward_s
                + schedule.backward_s * (remaining - size) / workload.params
            )
            result.append((start, times["update", subgroup][1], gradient))
        elif ("gradient up", subgroup) in times and workload.master != "fp32":
            result.append(
                (
                    times["gradient up", subgroup][0],
                    times["update", subgroup][1],
                    gradient,
                )
            )
        remaining -= size
    return result


def grid(schedule: Schedule, points: int = 4000) -> np.ndarray:
    """Return evenly spaced times over the iteration."""
    return (np.arange(points) + 0.5) / points * schedule.iteration_s


def used(schedule: Schedule, times: np.ndarray) -> np.ndarray:
    """Return the bytes on the device at each time."""
    total = np.zeros(len(times))
    for start, end, size in stays(schedule):
        total[(times >= start) & (times < end)] += size
    return total


def free(schedule: Schedule, times: np.ndarray) -> np.ndarray:
    """Return the free bytes at each time, if forward and backward did not wait."""
    steps = schedule.workload.gpu_free or ()
    return np.array([value_at(steps, time) for time in times])
