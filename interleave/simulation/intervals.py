"""The intervals of an iteration in which neither the phase nor the free memory changes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ebbtide.interleave.model.workload import Workload, value_at
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE

# The phase of the interval between backward and update, in which only the step's overhead passes.
OVERHEAD = "overhead"


@dataclass(frozen=True)
class IterationInterval:
    """A part of the iteration in which neither the phase nor the free memory changes.

    Attributes:
        phase: `other`, `forward`, `backward`, `overhead` (of the step) or `update`.
        length_s: Seconds; 0 for the update, whose length is the variable of the program.
        free_bytes: Free device memory.
        gradients_ready: Share of the gradients that the backward has computed by its end.
    """

    phase: str
    length_s: float
    free_bytes: float
    gradients_ready: float


def intervals_of(workload: Workload, machine: Machine) -> list[IterationInterval]:
    """Return the intervals of an iteration, the update last."""
    everything = (workload.state_bytes + workload.grad_bytes) * workload.params
    free_steps = workload.gpu_free or ((0.0, min(machine.gpu_memory_bytes or everything, everything)),)
    edges = [0.0, workload.other_s, workload.other_s + workload.forward_s, workload.compute_s]
    cuts = sorted({*edges, *(time for time, _ in free_steps if 0 < time < workload.compute_s)})
    intervals = []
    for start, end in itertools.pairwise(cuts):
        phase = (OTHER, FORWARD, BACKWARD)[sum(start >= edge for edge in edges[1:3])]
        ready = (end - edges[2]) / workload.backward_s if phase == BACKWARD and workload.backward_s > 0 else 0.0
        intervals.append(IterationInterval(phase, end - start, value_at(free_steps, start), ready))
    # More free memory later in the update can only help: the largest value counts for all of it.
    in_update = max(
        value_at(free_steps, workload.compute_s), *(size for time, size in free_steps if time > workload.compute_s), 0.0
    )
    intervals.append(IterationInterval(OVERHEAD, machine.step_overhead_s or 0.0, in_update, 1.0))
    intervals.append(IterationInterval(UPDATE, 0.0, in_update, 1.0))
    return intervals
