"""Device memory for state, allocated when a plan is set, and handed out to the
operations of the plan."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ebbtide.interleave.engine.devices.device import Device, Mark
from ebbtide.interleave.engine.forks import fork_lock
from ebbtide.interleave.engine.runtime.layout import Subgroup, state_elements
from ebbtide.interleave.model.kinds import find_kind
from ebbtide.interleave.model.operations import split_lane
from ebbtide.interleave.model.plan import Op, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine, StoragePath

_WIDTH = torch.float32.itemsize
# Slow copies to the host and fast ones to the device: a plan uses as much device memory
# as it can.
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


@dataclass
class Block:
    """Device memory (fp32, one dimension) of an arena, and the marks that a stream must
    wait for before it uses it."""

    memory: torch.Tensor
    marks: Sequence[Mark]

    @property
    def elements(self) -> int:
        return len(self.memory)


class Arena:
    """Hands out device memory in blocks, and again as soon as their last use is issued.

    The next stream waits for the mark of that use. Memory that is free for a part of an
    iteration is allocated when it is needed, and then released to the job.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Block] = []
        self._total_bytes = 0
        # What blocks may hold: while they are in use, and at any time.
        self._max_bytes = 0.0
        self._kept_bytes = 0.0
        self._lock = fork_lock()

    def reserve(self, sizes: Sequence[int], kept_bytes: float) -> None:
        """Hold free blocks of these sizes (in elements), and no others, besides the
        blocks in use.

        `kept_bytes` of them may be held during the whole iteration. No operation may
        run. Raises DeviceMemoryError, as does `take`."""
        with self._lock:
            missing = Counter(sizes)
            kept = []
            for block in self._free:
                if missing[block.elements]:
                    missing[block.elements] -= 1
                    kept.append(block)
                else:
                    self._release(block)
            self._free = kept
            self._max_bytes = self._total_bytes + _WIDTH * sum(missing.elements())
            self._kept_bytes = min(self._max_bytes, kept_bytes)
            for elements in sorted(missing.elements(), reverse=True):
                if self._total_bytes + _WIDTH * elements <= self._kept_bytes:
                    self._free.append(self._allocate(elements))

    def fits(self, elements: int) -> bool:
        """Return whether `take` has a block of this many elements now."""
        with self._lock:
            has_block = any(block.elements >= elements for block in self._free)
            return has_block or self._total_bytes + _WIDTH * elements <= self._max_bytes

    def take(self, elements: int) -> Block:
        """Return a block of at least this many elements: the smallest free one, or else
        a new one."""
        with self._lock:
            large_enough = [block for block in self._free if block.elements >= elements]
            if not large_enough:
                return self._allocate(elements)
            block = min(large_enough, key=lambda block: block.elements)
            self._remove(block)
            return block

    def give(self, block: Block, mark: Mark) -> None:
        """Take a block back, whose last use is before a mark."""
        block.marks = [mark]
        with self._lock:
            self._free.append(block)

    def trim(self) -> None:
        """Release free blocks beyond the memory that may be held during the whole
        iteration."""
        with self._lock:
            for block in [
                block
                for block in self._free
                if all(mark.is_passed for mark in block.marks)
            ]:
                if self._total_bytes <= self._kept_bytes:
                    return
                self._remove(block)
                self._release(block)

    def release(self) -> None:
        """Release all free blocks. No operation may run meanwhile."""
        with self._lock:
            for block in self._free:
                self._release(block)
            self._free.clear()

    def _allocate(self, elements: int) -> Block:
        memory = self._device.allocate_state(elements, rows=1).view(-1)
        self._total_bytes += memory.nbytes
        return Block(memory, [self._device.record("memory")])

    def _remove(self, block: Block) -> None:
        # By identity: equality would compare tensors.
        self._free = [other for other in self._free if other is not block]

    def _release(self, block: Block) -> None:
        self._total_bytes -= block.memory.nbytes
        self._device.release(block.memory)


def worst_case(plan: Plan, workload: Workload) -> Schedule:
    """Return a schedule in which a plan uses as much device memory as it can."""
    paths = max(
        (split_lane(op.resource)[1] + 1 for op in plan.ops if op.kind == "read"),
        default=0,
    )
    return simulate(
        plan, workload, replace(_WORST_CASE, storage=(_FAST_STORAGE,) * paths)
    )


def gradient_elements(subgroup: Subgroup) -> int:
    """Return the fp32 elements of memory for a gradient that was copied to the host and
    back.

    It takes none if it fits the memory of its parameter, with the same dtype and no
    part of the master, which nobody reads until the update."""
    if subgroup.rule.reads_params:
        return int(-(-subgroup.params * subgroup.grad_dtype.itemsize // 4))
    return subgroup.params if subgroup.grad_dtype != subgroup.dtype else 0


def acquired_elements(op: Op, subgroups: Sequence[Subgroup]) -> int:
    """Return the number of fp32 elements of device memory that an operation takes."""
    content = find_kind(op.kind).takes
    if content == "state":
        return state_elements(subgroups[op.subgroup])
    return gradient_elements(subgroups[op.subgroup]) if content == "gradient" else 0


def block_sizes(schedule: Schedule, subgroups: Sequence[Subgroup]) -> list[int]:
    """Return the sizes, in fp32 elements, of the blocks that a plan works with in its
    worst case, besides the blocks of resident state.

    A block is used again, and has the size of the largest that it is used for."""
    blocks = _Blocks()
    # In the second iteration parked state begins where the first one left it.
    for _ in range(2):
        for subgroup in sorted(schedule.plan.parked):
            blocks.take(("state", subgroup), state_elements(subgroups[subgroup]))
        for op in _memory_changes(schedule):
            kind = find_kind(op.kind)
            if kind.takes is not None:
                blocks.take((kind.takes, op.subgroup), acquired_elements(op, subgroups))
            elif kind.gives is not None:
                blocks.give((kind.gives, op.subgroup))
    return blocks.sizes


def plan_bytes(schedule: Schedule, subgroups: Sequence[Subgroup]) -> int:
    """Return the device memory that the blocks of a plan hold, in bytes.

    Resident state is included.
    """
    resident = sum(
        state_elements(subgroups[subgroup]) for subgroup in schedule.plan.resident
    )
    return 4 * (resident + sum(block_sizes(schedule, subgroups)))


def _memory_changes(schedule: Schedule) -> list[Op]:
    """Return the operations that take device memory when they start or give it back
    when they end, in that order."""
    changes = []
    for index, (op, start, end) in enumerate(schedule.items()):
        kind = find_kind(op.kind)
        if kind.takes is not None:
            changes.append((start, index, op))
        elif kind.gives is not None:
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
        number = min(
            self._free,
            key=lambda free: (sizes[free] < elements, abs(sizes[free] - elements)),
        )
        self._free.remove(number)
        sizes[number] = max(sizes[number], elements)
        self._taken[key] = number

    def give(self, key: tuple[str, int]) -> None:
        if key in self._taken:
            self._free.append(self._taken.pop(key))
