"""The device memory that a plan needs, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.engine.runtime.state_rows import state_elements
from ebbtide.interleave.model.plan import Op, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.machines.storage import StoragePath

# Copies to the device end at once and copies to the host are slow on it, so a plan uses as much device memory as it can
# on any machine.
_WORST_CASE = Machine(
    name="worst case of device memory",
    h2d_bytes_per_s=1e13,
    d2h_bytes_per_s=1e6,
    h2d_pageable_bytes_per_s=1e13,
    d2h_pageable_bytes_per_s=1e13,
    host_memory_bytes_per_s=1e14,
    cpu_update_params_per_s=1e6,
    cpu_cast_params_per_s=1e13,
    gpu_update_params_per_s=1e15,
)
_FAST_STORAGE = StoragePath(read_bytes_per_s=1e13, write_bytes_per_s=1e13)


def worst_case(plan: Plan, workload: Workload) -> Schedule:
    """Return a schedule in which a plan uses as much device memory as it can."""
    paths = max((op.path + 1 for op in plan.ops if op.kind == "read"), default=0)
    return simulate(plan, workload, replace(_WORST_CASE, storage=(_FAST_STORAGE,) * paths))


def gradient_elements(subgroup: Subgroup) -> int:
    """Return the number of fp32 elements of memory for a gradient that was copied to the host and back.

    It is written to the memory of the parameter, which nobody reads until the update has written it again from the
    master, so it needs none. A gradient of another dtype than the parameter has a block of its own; so has one whose
    parameter is a part of the master."""
    if subgroup.has_remainders:
        return int(-(-subgroup.params * subgroup.grad_dtype.itemsize // 4))
    return subgroup.params if subgroup.grad_dtype != subgroup.dtype else 0


def acquired_elements(op: Op, subgroups: Sequence[Subgroup]) -> int:
    """Return the number of fp32 elements of device memory that an operation takes."""
    if op.kind == "fetch":
        return state_elements(subgroups[op.subgroup])
    return gradient_elements(subgroups[op.subgroup]) if op.kind == "gradient up" else 0


def block_sizes(schedule: Schedule, subgroups: Sequence[Subgroup]) -> list[int]:
    """Return the sizes of the blocks that a plan works with, besides those of resident state, in fp32 elements.

    Blocks are used again, so even subgroups need the peak of the plan's memory and no more. With uneven ones a block
    has the size of the largest that it is used for.

    Args:
        schedule: The worst case of the plan.
        subgroups: The subgroups.
    """
    blocks = _Blocks()
    # In the second iteration parked state begins where the first one left it.
    for _ in range(2):
        for subgroup in sorted(schedule.plan.parked):
            blocks.take(("state", subgroup), state_elements(subgroups[subgroup]))
        for op in _memory_changes(schedule):
            if op.kind in ("fetch", "gradient up"):
                blocks.take((_CONTENTS[op.kind], op.subgroup), acquired_elements(op, subgroups))
            else:
                blocks.give((_CONTENTS[op.kind], op.subgroup))
    return blocks.sizes


def plan_bytes(schedule: Schedule, subgroups: Sequence[Subgroup]) -> int:
    """Return the device memory that the blocks of a plan hold, resident state included, in bytes."""
    resident = sum(state_elements(subgroups[subgroup]) for subgroup in schedule.plan.resident)
    return 4 * (resident + sum(block_sizes(schedule, subgroups)))


# What the blocks contain that operations take and give back.
_CONTENTS = {"fetch": "state", "flush": "state", "gradient up": "gradient", "update": "gradient"}


def _memory_changes(schedule: Schedule) -> list[Op]:
    """Return the operations that take device memory when they start, or give it back when they end, in that order."""
    changes = []
    for index, (op, start, end) in enumerate(schedule.items()):
        if op.kind in ("fetch", "gradient up"):
            changes.append((start, index, op))
        elif op.kind in ("flush", "update"):
            changes.append((end, index, op))
    return [op for _, _, op in sorted(changes, key=lambda change: change[:2])]


class _Blocks:
    """Blocks that grow with what they are used for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._free: list[int] = []
        self._taken: dict[tuple[str, int], int] = {}

    def take(self, key: tuple[str, int], elements: int) -> None:
        if not elements or key in self._taken:
            return
        if not self._free:
            self._free.append(len(self.sizes))
            self.sizes.append(0)
        # The smallest that is large enough, or else the largest, which grows.
        sizes = self.sizes
        number = min(self._free, key=lambda free: (sizes[free] < elements, abs(sizes[free] - elements)))
        self._free.remove(number)
        sizes[number] = max(sizes[number], elements)
        self._taken[key] = number

    def give(self, key: tuple[str, int]) -> None:
        if key in self._taken:
            self._free.append(self._taken.pop(key))
