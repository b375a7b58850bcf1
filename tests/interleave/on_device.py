"""What lies on the device, written down once more: subgroup by subgroup, on a fine grid of times."""

from __future__ import annotations

import numpy as np

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import value_at

# (from s, to s, bytes)
Stay = tuple[float, float, float]


def stays(schedule: Schedule) -> list[Stay]:
    """Every stay of state and of gradients on the device."""
    job, plan = schedule.workload, schedule.plan
    times = {(op.kind, op.subgroup): (start, end) for op, start, end in schedule.items()}
    length = schedule.iteration_s
    found = []
    left = job.params
    for subgroup, size in enumerate(job.subgroups):
        state, gradient = size * job.state_bytes, size * job.grad_bytes
        if subgroup in plan.resident:
            found.append((0.0, length, state))
        elif subgroup in plan.parked:
            found.append((0.0, times["flush", subgroup][1], state))
            found.append((times["fetch", subgroup][0], length, state))
        elif ("fetch", subgroup) in times:
            found.append((times["fetch", subgroup][0], times["flush", subgroup][1], state))
        if subgroup in plan.kept_gradients and not job.gradients_stay:
            # The backward makes gradients in reverse, evenly; that of a subgroup from where the next one's is made.
            begun = schedule.other_s + schedule.forward_s + schedule.backward_s * (left - size) / job.params
            found.append((begun, times["update", subgroup][1], gradient))
        left -= size
    return found


def grid(schedule: Schedule, points: int = 4000) -> np.ndarray:
    """Times over the iteration, evenly."""
    return (np.arange(points) + 0.5) / points * schedule.iteration_s


def used(schedule: Schedule, times: np.ndarray) -> np.ndarray:
    """Bytes on the device at each time."""
    total = np.zeros(len(times))
    for start, end, size in stays(schedule):
        total[(times >= start) & (times < end)] += size
    return total


def free(schedule: Schedule, times: np.ndarray) -> np.ndarray:
    """Bytes free beside the job at each time, where forward and backward did not wait."""
    line = schedule.workload.gpu_free or ()
    return np.array([value_at(line, at) for at in times])
