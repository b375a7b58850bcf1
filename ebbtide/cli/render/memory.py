"""Prints the use of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import MAX_ROWS, print_omitted, print_table
from ebbtide.units import bytes_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.memory import Gap, MemoryUse, PoolUse
    from ebbtide.profiler.trace import Trace
    from ebbtide.profiler.trace.metadata import AllocatorState


def print_memory(trace: Trace, memory: MemoryUse) -> None:
    """Print the lowest and highest use of each memory pool per phase, and the differences between pools."""
    from ebbtide.analysis.metrics.missing import NO_MEMORY, no_iterations, on_demand_remarks

    if not memory.pools:
        echo(f"{trace.path}: {NO_MEMORY}")
        return
    if memory.pools[0].phase is None:
        echo(f"{trace.path}: lowest and highest use over the whole trace ({no_iterations(trace)})")
    else:
        echo(f"{trace.path}: lowest and highest use per phase, medians over the iterations")
    for remark in on_demand_remarks(trace):
        echo(remark)

    def rows(uses: Sequence[PoolUse | Gap], names: list[str]) -> list[list[str]]:
        return [
            [name, use.phase or "whole trace", bytes_text(use.low_bytes), bytes_text(use.peak_bytes)]
            for name, use in zip(names, uses, strict=True)
        ]

    pools = rows(memory.pools, [use.pool for use in memory.pools])
    print_table("Memory", ["pool", "phase", "lowest", "highest"], pools[:MAX_ROWS])
    print_omitted(len(pools))
    gaps = rows(memory.gaps, [gap.gap for gap in memory.gaps])
    if gaps:
        print_table("Differences between pools", ["difference", "phase", "lowest", "highest"], gaps[:MAX_ROWS])
        print_omitted(len(gaps))
    for rank, state in memory.allocators:
        print_allocator(rank, state)


def print_allocator(rank: int, state: AllocatorState) -> None:
    """Print the segments of torch's allocator at the end of a memory snapshot."""
    rows = [
        ["reserved", bytes_text(state.reserved_bytes), f"{state.segments:,} segments"],
        ["of these in private pools", bytes_text(state.private_bytes), f"{state.private_segments:,} segments"],
        ["allocated", bytes_text(state.allocated_bytes), "blocks in use"],
        ["requested", bytes_text(state.requested_bytes), "what tensors asked for"],
        ["inactive", bytes_text(state.inactive_bytes), "free, in segments with blocks in use"],
        ["largest free block", bytes_text(state.largest_free_bytes), ""],
    ]
    print_table(f"Allocator at the end, rank {rank}, {state.device}", ["bytes of", "size", ""], rows)
