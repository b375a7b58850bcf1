"""Workloads with another number of parameters, other subgroups, or other free
memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import WorkloadError
from ebbtide.features.sweep.task import Scenario
from ebbtide.interleave.model.workload import FreeMemorySteps
from ebbtide.interleave.replay.inputs import with_min_free
from tests.interleave.job_files import workload

sizes = st.floats(0, 1e12)
free_steps = st.lists(sizes, min_size=1, max_size=8).map(
    lambda values: tuple((float(i), v) for i, v in enumerate(values))
)


def test_scenario__the_default_changes_nothing() -> None:
    job = workload()
    assert Scenario().apply_to(job) == job


def test_scenario__twice_the_parameters() -> None:
    free = [
        {"at_s": at, "bytes": size}
        for at, size in ((0, 20e9), (0.05, 19e9), (0.2, 6e9), (0.9, 30e9), (1.2, 31e9))
    ]
    job = workload(other_s=0.1, gpu_free_bytes=free)
    twice = Scenario(scale_params=2).apply_to(job)
    assert (twice.params, len(twice.subgroups)) == (4_000_000_000, 40)
    assert (twice.forward_s, twice.backward_s, twice.other_s) == (0.4, 1.2, 0.1)
    # 2e9 more parameters of 2 bytes are on the device; memory changes at the same parts
    # of forward and backward.
    assert twice.gpu_free is not None
    times, sizes = zip(*twice.gpu_free, strict=True)
    assert sizes == (16e9, 15e9, 2e9, 26e9, 27e9)
    assert times == pytest.approx((0.0, 0.05, 0.3, 1.7, 2.0))


def test_scenario__a_smaller_job_leaves_more_memory_free() -> None:
    assert Scenario(scale_params=0.5).apply_to(workload()).min_free_bytes == 8e9


def test_scenario__refuses_parameters_that_do_not_fit() -> None:
    with pytest.raises(WorkloadError, match=r"need 1\.86 GiB more"):
        Scenario(scale_params=3).apply_to(workload())
    # Unless the scenario sets the free memory.
    assert (
        Scenario(scale_params=3, free_bytes=1e9).apply_to(workload()).min_free_bytes
        == 1e9
    )
    with pytest.raises(WorkloadError, match="less than one parameter"):
        Scenario(scale_params=1e-6).apply_to(
            workload(params=1000, subgroup_params=1000)
        )


def test_scenario__unknown_free_memory_stays_unknown() -> None:
    assert (
        Scenario(scale_params=2).apply_to(workload(gpu_free_bytes=None)).gpu_free
        is None
    )


def test_scenario__recorded_subgroups_become_equal_ones_of_their_mean_size() -> None:
    job = replace(workload(params=1000, subgroup_params=100), sizes=(400, 350, 250))
    twice = Scenario(scale_params=2).apply_to(job)
    assert twice.subgroups == (334, 334, 334, 334, 334, 330)
    assert Scenario(subgroup_params=600).apply_to(job).subgroups == (600, 400)
    assert Scenario(free_bytes=1.0).apply_to(job).subgroups == (400, 350, 250)


def test_scenario__subgroups_are_at_most_the_whole_model_and_not_too_many() -> None:
    assert Scenario(subgroup_params=10**12).apply_to(workload()).subgroups == (
        2_000_000_000,
    )
    with pytest.raises(WorkloadError, match="choose larger"):
        Scenario(subgroup_params=10).apply_to(workload())


@given(free_steps, sizes)
def test_with_min_free__sets_the_minimum_and_keeps_the_maximum_and_the_order(
    free: FreeMemorySteps, min_bytes: float
) -> None:
    before = [size for _, size in free]
    after = [size for _, size in with_min_free(free, min_bytes)]
    assert min(after) == min_bytes
    if min_bytes >= max(before) or min(before) == max(before):
        assert set(after) == {min_bytes}
        return
    assert max(after) == pytest.approx(max(before))
    assert [at for at, _ in with_min_free(free, min_bytes)] == [at for at, _ in free]
    assert all(
        a <= b
        for x, a in zip(before, after, strict=True)
        for y, b in zip(before, after, strict=True)
        if x < y
    )


@given(free_steps)
def test_with_min_free__the_present_minimum_changes_nothing(
    free: FreeMemorySteps,
) -> None:
    values = [size for _, size in free]
    after = with_min_free(free, min(values))
    if min(values) < max(values):
        assert [size for _, size in after] == pytest.approx(
            values, abs=1e-9 * max(values)
        )


def test_with_min_free__unknown_free_memory_becomes_constant() -> None:
    assert with_min_free(None, 5.0) == ((0.0, 5.0),)
    assert Scenario(free_bytes=0.0).apply_to(workload()).gpu_free == (
        (0.0, pytest.approx(17.5e9)),
        (0.2, 0.0),
        (0.8, 30e9),
    )
