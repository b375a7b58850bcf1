"""The simulated allocator: its rules, and the segments of real runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbtide.features.dryrun.memory.caching_allocator import CachingAllocator
from ebbtide.profiler.memory_snapshot.allocations import allocation_rows
from ebbtide.profiler.memory_snapshot.reader import read_snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS

PUBLISHED = Path(__file__).parents[4] / "shared" / "published" / "snapshots"
MIB = 1 << 20


SIZES = [
    (1, 512, 2 * MIB),
    (513, 1024, 2 * MIB),
    (MIB, MIB, 2 * MIB),
    (MIB + 1, MIB + 512, 20 * MIB),
    (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
    (10 * MIB, 10 * MIB, 10 * MIB),
    (11 * MIB, 12 * MIB, 12 * MIB),
]


def test_caching_allocator__rounds_blocks_and_segments() -> None:
    for size, allocated, reserved in SIZES:
        allocator = CachingAllocator()
        allocator.allocate(size)
        assert (
            allocator.allocated_bytes,
            allocator.reserved_bytes,
            allocator.segments_allocated,
        ) == (
            allocated,
            reserved,
            1,
        )


def test_caching_allocator__merges_neighbours_and_reuses_the_smallest_block_that_fits() -> (
    None
):
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    # The three in the middle are one block of 12 MiB now.
    middle = allocator.allocate(12 * MIB)
    assert (middle.address, allocator.segments_allocated) == (blocks[1].address, 1)
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(blocks[0])
    allocator.free(blocks[4])
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (0, 0)


def test_caching_allocator__keeps_the_rest_of_a_large_block_that_is_too_small_to_split() -> (
    None
):
    allocator = CachingAllocator()
    block = allocator.allocate(11 * MIB)
    allocator.free(block)
    # 12 MiB are free: the rest of 1 MiB stays with the block, one of more than 1 MiB
    # does not.
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    allocator.free(block)
    assert allocator.allocate(11 * MIB - 512).size == 11 * MIB - 512


@pytest.mark.parametrize("name", ["cs336-ctx128-forward", "cs336-ctx128-fullstep"])
def test_caching_allocator__takes_the_segments_of_a_real_run(name: str) -> None:
    path = PUBLISHED / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"{path.name} is not published here")
    snapshot = read_snapshot(lambda: path.open("rb"))
    names = {number: action for action, number in ACTIONS.items()}
    allocator = CachingAllocator()
    rows = allocation_rows(snapshot, 0, start_ns=0)
    older = rows[rows["start_ns"] == 0].sort_values("address")
    live = {
        address: allocator.allocate(size)
        for address, size in zip(older["address"], older["bytes"], strict=True)
    }
    reserved_before, segments_before = (
        allocator.reserved_bytes,
        allocator.segments_allocated,
    )
    segments = grown = errors = 0
    events = np.concatenate([*snapshot.events[0].blocks(*ACTIONS)])
    for number, address, size in events[["action", "address", "bytes"]].tolist():
        action = names[number]
        if action == "segment_alloc":
            segments, grown = segments + 1, grown + size
        elif action == "alloc":
            live[address] = allocator.allocate(size)
            errors += allocator.reserved_bytes - reserved_before != grown
        elif action == "free_completed" and address in live:
            allocator.free(live.pop(address))
    assert segments > 200
    assert (
        allocator.segments_allocated - segments_before,
        allocator.reserved_bytes - reserved_before,
        errors,
    ) == (
        segments,
        grown,
        0,
    )
