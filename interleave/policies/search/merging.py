"""Workloads in which neighbouring subgroups are merged, so that the search has fewer of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.interleave.model.workload import Workload

# So many slots on the device suffice to fetch, update and flush at the same time.
_BUFFERS = 3


@dataclass(frozen=True)
class MergedWorkload:
    """A workload with neighbouring subgroups merged.

    Attributes:
        workload: The workload of merged subgroups.
        factor: How many subgroups are merged into one.
        buffers: In the update so many merged subgroups take the memory of single ones: the few slots through which
            state is streamed must be no larger than in the real workload. The free memory is larger instead.
    """

    workload: Workload
    factor: int
    buffers: int


def merged_workloads(workload: Workload, *max_subgroups: int) -> list[MergedWorkload]:
    """Return the workload with neighbouring subgroups merged, and at last as it is.

    Args:
        workload: The workload.
        *max_subgroups: How many subgroups there may be, from few to many. Each factor divides the one before it.
    """
    factors = [1]
    for limit in reversed(max_subgroups):
        factor = factors[0] * -(-len(workload.subgroups) // (factors[0] * limit))
        if factor > factors[0]:
            factors.insert(0, factor)
    return [_merge_neighbours(workload, factor) for factor in factors]


def _merge_neighbours(workload: Workload, factor: int) -> MergedWorkload:
    if factor == 1:
        return MergedWorkload(workload, 1, 0)
    sizes = workload.subgroups
    merged = tuple(sum(sizes[start : start + factor]) for start in range(0, len(sizes), factor))
    largest_bytes = workload.state_bytes * max(sizes)
    steps = workload.gpu_free or ((0.0, 0.0),)
    in_update = workload.gpu_free_from(workload.compute_s)
    buffers = min(_BUFFERS, int(max(size for _, size in in_update) / largest_bytes * (1 + 1e-9)))
    growth = max(merged) / max(sizes) - 1
    before = tuple(step for step in steps if step[0] < workload.compute_s)
    larger = tuple((time, size + growth * min(size, buffers * largest_bytes)) for time, size in in_update)
    return MergedWorkload(replace(workload, sizes=merged, gpu_free=before + larger), factor, buffers)
