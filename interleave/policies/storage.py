"""Storage for what host memory does not hold: when it is used, and which state is there."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.interleave.model.host_memory import available_host_bytes, needed_host_bytes
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.stored_plan import StorageLayout, stored_in
from ebbtide.interleave.simulation.steps import simulate_steps
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

DEFAULT_LAYOUT, SMALLEST_LAYOUT = StorageLayout("spread", 3), StorageLayout("spread", 1, paths=1)


def layouts(paths: int) -> list[StorageLayout]:
    """Return the layouts that are compared, for a machine with so many paths of storage."""
    numbers = dict.fromkeys((paths, -(-paths // 2), 1))
    return [
        StorageLayout(placement, buffers, number)
        for number in numbers
        for buffers in (3, 2, 4, 6, 1)
        for placement in ("spread", "first", "last")
    ]


def with_storage(plan: Plan, workload: Workload, machine: Machine) -> Plan:
    """Return a plan with as much of its state in storage as host memory does not hold.

    A plan that fits into host memory, or has state in storage already, is returned as it is, as is any plan where the
    machine has no storage or its host memory is not known. Of all layouts that fit, the one with the shortest mean
    iteration is taken; if none fits, the one that needs the least host memory.

    Args:
        plan: A valid plan.
        workload: The workload.
        machine: The machine.

    Raises:
        MachineError: The machine lacks a rate that the plan needs.
    """
    if not _needs_storage(plan, workload, machine):
        return plan
    choices = layouts(len(machine.storage))
    plans = dict.fromkeys(stored_in(plan, workload, machine, layout) for layout in choices)
    fitting = [candidate for candidate in plans if not _exceeds_host(candidate, workload, machine)]
    # If none fits, the least memory is what is missing.
    candidates = fitting or [min(plans, key=lambda candidate: needed_host_bytes(candidate, workload))]
    best = min(candidates, key=lambda candidate: simulate_steps(candidate, workload, machine).cost(machine))
    return replace(best, remark="; ".join(filter(None, (plan.remark, storage_summary(best, workload))))).validate(
        workload
    )


def with_default_storage(plan: Plan, workload: Workload, machine: Machine) -> Plan:
    """Return the plan of `with_storage` with the default layout, not validated: for searches that make many plans."""
    return stored_in(plan, workload, machine, DEFAULT_LAYOUT) if _needs_storage(plan, workload, machine) else plan


def with_fitting_storage(plan: Plan, workload: Workload, machine: Machine) -> Plan:
    """Return the same, with the layout that needs the least host memory where the default one does not fit."""
    stored = with_default_storage(plan, workload, machine)
    if stored is plan or not _exceeds_host(stored, workload, machine):
        return stored
    return stored_in(plan, workload, machine, SMALLEST_LAYOUT)


def _needs_storage(plan: Plan, workload: Workload, machine: Machine) -> bool:
    if not machine.storage or plan.storage_buffers:
        return False
    return _exceeds_host(plan, workload, machine)


def _exceeds_host(plan: Plan, workload: Workload, machine: Machine) -> bool:
    available = available_host_bytes(workload, machine)
    return available is not None and needed_host_bytes(plan, workload) > available


def storage_summary(plan: Plan, workload: Workload) -> str:
    """Return in words which state is in storage."""
    stored = plan.stored
    size = workload.state_bytes * sum(workload.subgroups[subgroup] for subgroup in stored)
    buffers = len({op.buffer for op in plan.ops if op.kind == "read"})
    return (
        f"state of {len(stored)} of {plan.subgroups} subgroups ({bytes_text(size)}) in storage, through "
        f"{buffers} buffer{'s' if buffers != 1 else ''} in host memory"
    )
