"""Host memory: how much of it a plan needs, and how much there is."""

from __future__ import annotations

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine


def available_host_bytes(workload: Workload, machine: Machine) -> float | None:
    """Return the host memory that a plan may use: the rank's part of the host, or less where the job leaves less.

    None: it is not known.
    """
    limits = (machine.host_memory_bytes, workload.host_free_bytes)
    return min((limit for limit in limits if limit is not None), default=None)


def copy_buffer_bytes(plan: Plan) -> float:
    """Return the host memory of gradients that are copied down and of parameters that are copied up.

    Each of these copies has a buffer of its own, and parameters that are copied up twice have one.
    """
    buffers = {(op.kind, op.subgroup): op.nbytes for op in plan.ops if op.kind in ("gradient down", "upload")}
    return sum(buffers.values())


def needed_host_bytes(plan: Plan, workload: Workload) -> float:
    """Return the host memory that a plan needs.

    It is that of state that is neither resident nor in storage, of the buffers of state in storage, of a second place
    for state that is updated speculatively, and of the buffers of copies. State in storage needs no second place: its
    new version is written beside the old one.
    """
    sizes, stored = workload.subgroups, plan.stored
    elsewhere = plan.resident | stored
    offloaded = sum(size for subgroup, size in enumerate(sizes) if subgroup not in elsewhere)
    spare = sum(sizes[subgroup] for subgroup in plan.updated_beside - stored)
    return workload.state_bytes * (offloaded + spare) + sum(plan.storage_buffers) + copy_buffer_bytes(plan)
