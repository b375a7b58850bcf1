"""What a workload becomes when it is asked for at another size, or with other memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import WorkloadError
from ebbtide.interleave.experiments.sweep import Scenario
from ebbtide.interleave.experiments.sweep.scenario import with_least
from ebbtide.interleave.model.workload import FreeLine
from tests.interleave.experiments.sweep.sweeps import workload

sizes = st.floats(0, 1e12)
lines = st.lists(sizes, min_size=1, max_size=8).map(lambda values: tuple((float(i), v) for i, v in enumerate(values)))


def test_a_scenario_that_asks_for_nothing_changes_nothing() -> None:
    job = workload()
    assert Scenario().of(job) == job


def test_twice_the_parameters() -> None:
    line = [{"at_s": at, "bytes": size} for at, size in ((0, 20e9), (0.05, 19e9), (0.2, 6e9), (0.9, 30e9), (1.2, 31e9))]
    job = workload(other_s=0.1, gpu_free_bytes=line)
    twice = Scenario(scale_params=2).of(job)
    assert (twice.params, len(twice.subgroups)) == (4_000_000_000, 40)
    assert (twice.forward_s, twice.backward_s, twice.other_s) == (0.4, 1.2, 0.1)
    # 2e9 more parameters of 2 bytes lie on the device; memory changes at the same places of forward and backward.
    assert twice.gpu_free is not None
    times, sizes = zip(*twice.gpu_free, strict=True)
    assert sizes == (16e9, 15e9, 2e9, 26e9, 27e9)
    assert times == pytest.approx((0.0, 0.05, 0.3, 1.7, 2.0))


def test_a_smaller_job_leaves_more_free() -> None:
    assert Scenario(scale_params=0.5).of(workload()).least_free == 8e9


def test_parameters_that_have_no_room_are_refused() -> None:
    with pytest.raises(WorkloadError, match="need 2 GB more"):
        Scenario(scale_params=3).of(workload())
    # Unless the question says what is free then.
    assert Scenario(scale_params=3, free_bytes=1e9).of(workload()).least_free == 1e9
    with pytest.raises(WorkloadError, match="are none"):
        Scenario(scale_params=1e-6).of(workload(params=1000, subgroup_params=1000))


def test_what_is_free_stays_unknown_when_the_size_changes() -> None:
    assert Scenario(scale_params=2).of(workload(gpu_free_bytes=None)).gpu_free is None


def test_recorded_subgroups_become_even_ones_of_their_mean_size() -> None:
    job = replace(workload(params=1000, subgroup_params=100), sizes=(400, 350, 250))
    twice = Scenario(scale_params=2).of(job)
    assert twice.subgroups == (334, 334, 334, 334, 334, 330)
    assert Scenario(subgroup_params=600).of(job).subgroups == (600, 400)
    assert Scenario(free_bytes=1.0).of(job).subgroups == (400, 350, 250)


def test_subgroups_are_at_most_the_whole_and_not_too_many() -> None:
    assert Scenario(subgroup_params=10**12).of(workload()).subgroups == (2_000_000_000,)
    with pytest.raises(WorkloadError, match="choose larger"):
        Scenario(subgroup_params=10).of(workload())


@given(lines, sizes)
def test_a_line_meets_its_least_and_keeps_its_most_and_its_order(line: FreeLine, least: float) -> None:
    before = [size for _, size in line]
    after = [size for _, size in with_least(line, least)]
    assert min(after) == least
    if least >= max(before) or min(before) == max(before):
        assert set(after) == {least}
        return
    assert max(after) == pytest.approx(max(before))
    assert [at for at, _ in with_least(line, least)] == [at for at, _ in line]
    assert all(a <= b for x, a in zip(before, after, strict=True) for y, b in zip(before, after, strict=True) if x < y)


@given(lines)
def test_a_line_with_the_least_that_it_has_is_itself(line: FreeLine) -> None:
    values = [size for _, size in line]
    after = with_least(line, min(values))
    if min(values) < max(values):
        assert [size for _, size in after] == pytest.approx(values, abs=1e-9 * max(values))


def test_a_line_that_is_not_known_is_flat() -> None:
    assert with_least(None, 5.0) == ((0.0, 5.0),)
    assert Scenario(free_bytes=0.0).of(workload()).gpu_free == ((0.0, pytest.approx(17.5e9)), (0.2, 0.0), (0.8, 30e9))
