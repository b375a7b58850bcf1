"""Tests of merged workloads."""

from __future__ import annotations

import itertools

import pytest

from ebbtide.interleave.policies.search.best_plan import merged_workloads
from tests.interleave.simulation.test_simulator import even


@pytest.mark.parametrize("count", [1, 40, 41, 255, 256, 257, 1000, 99_999])
def test_merged_workloads__end_with_the_workload_itself(count: int) -> None:
    workload = even(count, 1000, gpu_free=((0.0, 1e9),))
    levels = merged_workloads(workload, 40, 256)
    assert levels[-1].workload == workload
    counts = [len(level.workload.subgroups) for level in levels]
    assert counts == sorted(set(counts))
    assert counts[0] <= 40
    assert len(levels) == (1 if count <= 40 else 2 if count <= 256 else 3)
    for level in levels:
        assert sum(level.workload.subgroups) == workload.params
    for coarse, fine in itertools.pairwise(levels):
        assert coarse.factor % fine.factor == 0


def test_merged_workloads__have_memory_for_as_many_slots_as_the_workload() -> None:
    """State of 12 kB a subgroup. Two of them fit, so two merged ones must fit in the
    update, and no more before it."""
    workload = even(
        80, 1000, forward_s=1.0, backward_s=2.0, gpu_free=((0.0, 30_000.0),)
    )
    merged = merged_workloads(workload, 40)[0]
    assert (merged.factor, merged.buffers) == (2, 2)
    assert merged.workload.gpu_free == ((0.0, 30_000.0), (3.0, 54_000.0))
