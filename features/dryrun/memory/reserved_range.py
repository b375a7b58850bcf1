"""The range of reserved memory that follows from workspaces of convolutions, which the
job can go on without."""

from ebbtide.features.dryrun.memory.allocator_pools import AllocatorBlock
from ebbtide.features.dryrun.memory.caching_allocator import CachingAllocator
from ebbtide.features.dryrun.memory.device_memory import DeviceBlock


def reserved_range(
    blocks: list[DeviceBlock],
    workspaces: list[DeviceBlock],
    allocators: tuple[CachingAllocator, CachingAllocator],
) -> tuple[int, int]:
    """Return the least and the largest peak of reserved memory, with no workspace and
    with the largest ones."""
    needed = [block for block in blocks if block.most is None]
    ends = [(block.end_ns, 0, block) for block in needed if block.end_ns is not None]
    starts = [(block.start_ns, 1, block) for block in [*needed, *workspaces]]
    events = sorted([*starts, *ends], key=lambda event: event[:2])
    none, all_of_them = (
        _peak(events, allocator, most)
        for allocator, most in zip(allocators, (0, 1), strict=True)
    )
    return min(none, all_of_them), max(none, all_of_them)


def _peak(
    events: list[tuple[int, int, DeviceBlock]],
    allocator: CachingAllocator,
    with_workspaces: int,
) -> int:
    peak, live = 0, dict[int, AllocatorBlock]()
    for t_ns, begins, block in events:
        if not begins:
            allocator.free(live.pop(id(block)))
        elif block.most is None:
            live[id(block)] = allocator.allocate(block.size, block.stream, t_ns)
        elif with_workspaces and (
            workspace := allocator.allocate(
                block.most, block.stream, t_ns, always=False
            )
        ):
            allocator.free(workspace)
        peak = max(peak, allocator.reserved_bytes)
    return peak
