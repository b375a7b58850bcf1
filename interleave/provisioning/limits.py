"""The part of a machine that limits an iteration."""

from __future__ import annotations

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.provisioning.training_job import ComputeTimes
from ebbtide.interleave.replay.results import limiting_resource
from ebbtide.machines.machine import Machine

# If the optimizer adds less than this share of the iteration, forward and backward limit it.
_SMALL_SHARE = 0.1
_NAMES = {"cpu": "cpu update", "gpu": "gpu update"}


def limiting_part(schedule: Schedule, machine: Machine, times: ComputeTimes) -> str:
    """Return what limits an iteration.

    Returns:
        `compute` or `collectives`, the longer one, if nothing is offloaded or the optimizer adds less than
        a tenth of the iteration; else what limits the update: `cpu update`, `gpu update`, `h2d`, `d2h`, `host memory`
        or `dependencies`.
    """
    if schedule.plan.policy == "gpu-only" or schedule.exposed_s < _SMALL_SHARE * schedule.iteration_s:
        compute_s = times.forward_s + times.backward_s + times.other_s - times.collectives_s
        return "collectives" if times.collectives_s > max(compute_s, 0.0) else "compute"
    resource = limiting_resource(schedule, machine)
    return _NAMES.get(resource, resource)
