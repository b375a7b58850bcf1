"""The intervals of an iteration in which neither the phase nor the free memory changes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ebbtide.interleave.model.durations import link_shares, norm_s
from ebbtide.interleave.model.plan import BACKWARD as BACKWARD_POINT
from ebbtide.interleave.model.plan import FORWARD as FORWARD_POINT
from ebbtide.interleave.model.plan import forward_points, gradient_ready_points
from ebbtide.interleave.model.workload import Workload, value_at
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE

# The phase between backward and update, in which the overhead of the step and the norm of the gradients pass.
OVERHEAD = "overhead"
# Where updates follow their gradients, so many of the last gradients, and so many of all, begin a new interval.
_LAST_CUTS, _SPREAD_CUTS = 4, 4
# Where updates may end in the forward, at most about so many subgroups, evenly spread, begin a new interval.
_FORWARD_CUTS = 12
# The shortest interval that a gradient begins, as a share of the backward.
_LEAST_INTERVAL = 1e-6


@dataclass(frozen=True)
class IterationInterval:
    """A part of the iteration in which neither the phase nor the free memory changes.

    Attributes:
        phase: `other`, `forward`, `backward`, `overhead` (of the step) or `update`.
        length_s: Seconds; 0 for the update, whose length is the variable of the program.
        free_bytes: Free device memory.
        gradients_ready: Share of the gradients that the backward has computed by its end.
        link_left: Shares of the link that the job's collectives leave, to the device and to the host.
        forward_done: Share of the forward that is done by its end, where updates may end in the forward; else None.
    """

    phase: str
    length_s: float
    free_bytes: float
    gradients_ready: float
    link_left: tuple[float, float] = (1.0, 1.0)
    forward_done: float | None = None


def gradient_ready_s(workload: Workload) -> list[float]:
    """Return when the backward has computed each subgroup's gradient, seconds from the start of the iteration."""
    begin_s = workload.compute_s - workload.backward_s
    return [begin_s + workload.backward_s * (point - BACKWARD_POINT) for point in gradient_ready_points(workload)]


def _gradient_cuts(workload: Workload) -> set[float]:
    """Return times at which gradients become ready, if updates follow them: some of all, and the last ones."""
    if workload.needs_all_gradients or not workload.backward_s:
        return set()
    ready_s = gradient_ready_s(workload)
    selected = {*range(min(_LAST_CUTS, len(ready_s))), *range(0, len(ready_s), max(1, len(ready_s) // _SPREAD_CUTS))}
    length_s = _LEAST_INTERVAL * workload.backward_s
    # The first subgroup's gradient is ready when the backward ends.
    return {ready_s[number] for number in selected if number and ready_s[number] < workload.compute_s - length_s}


def intervals_of(workload: Workload, machine: Machine) -> list[IterationInterval]:
    """Return the intervals of an iteration, the update last."""
    everything = (workload.state_bytes + workload.grad_bytes) * workload.params
    free_steps = workload.gpu_free or ((0.0, min(machine.gpu_memory_bytes or everything, everything)),)
    edges = [0.0, workload.other_s, workload.other_s + workload.forward_s, workload.compute_s]
    cuts = sorted(
        {*edges, *(time for time, _ in free_steps if 0 < time < workload.compute_s)} | _gradient_cuts(workload)
    )
    link_left = link_shares(workload, machine)
    intervals = []
    for start, end in itertools.pairwise(cuts):
        phase = (OTHER, FORWARD, BACKWARD)[sum(start >= edge for edge in edges[1:3])]
        ready = (end - edges[2]) / workload.backward_s if phase == BACKWARD and workload.backward_s > 0 else 0.0
        left = link_left.get(phase, (1.0, 1.0))
        intervals.append(IterationInterval(phase, end - start, value_at(free_steps, start), ready, left))
    # More free memory later in the update can only help: the largest value counts for all of it.
    in_update = max(
        value_at(free_steps, workload.compute_s), *(size for time, size in free_steps if time > workload.compute_s), 0.0
    )
    overhead_s = (machine.step_overhead_s or 0.0) + norm_s(workload, machine)
    intervals.append(IterationInterval(OVERHEAD, overhead_s, in_update, 1.0))
    intervals.append(IterationInterval(UPDATE, 0.0, in_update, 1.0))
    return intervals


def cycle_intervals_of(workload: Workload, machine: Machine) -> list[IterationInterval]:
    """Return the intervals from the beginning of a backward to that of the next, the forward cut into pieces.

    The first piece of the forward has no length: it is the wait before it.
    """
    intervals = intervals_of(workload, machine)
    before = [interval for interval in intervals if interval.phase == OTHER]
    forward = [interval for interval in intervals if interval.phase == FORWARD]
    rest = intervals[len(before) + len(forward) :]
    first_free = (forward or rest)[0].free_bytes
    link_left = link_shares(workload, machine).get(FORWARD, (1.0, 1.0))
    pieces = [IterationInterval(FORWARD, 0.0, first_free, 1.0, link_left, 0.0)]
    done = 0.0
    starts = sorted({point - FORWARD_POINT for point in forward_points(workload)})
    # The use of the last subgroup is the last thing that may wait.
    selected = {*starts[:: max(1, -(-len(starts) // _FORWARD_CUTS))], starts[-1]}
    for interval in forward:
        end = done + interval.length_s / workload.forward_s
        for cut in (*(share for share in sorted(selected) if done < share < end), end):
            length_s = (cut - done) * workload.forward_s
            pieces.append(replace(interval, length_s=length_s, gradients_ready=1.0, forward_done=min(cut, 1.0)))
            done = cut
    pieces[-1] = replace(pieces[-1], forward_done=1.0)
    return [*rest, *(replace(interval, gradients_ready=1.0) for interval in before), *pieces]
