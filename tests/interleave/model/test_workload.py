"""Workload files: what is read from them and what is refused; subgroups, and what is free when."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import WorkloadError
from ebbtide.interleave.model.workload import Workload, load_workload, workload_from
from ebbtide.interleave.replay.resolve import Size, find_workload, workload_of_size
from ebbtide.interleave.replay.results import workload_json
from tests.interleave.experiments.sweep.sweeps import WORKLOAD, workload
from tests.interleave.strategies import workloads


@given(workloads(), st.booleans())
def test_a_workload_file_is_read_as_it_was_printed(drawn: Workload, known: bool) -> None:
    job = drawn if known else replace(drawn, gpu_free=None, sizes=None)
    assert workload_from(json.loads(json.dumps(workload_json(job))), "file") == job


def test_what_a_file_need_not_tell() -> None:
    least = {"params": 2.5e9, "forward_s": 0.2, "backward_s": 0.6}
    job = Workload("w.json", params=2_500_000_000, subgroup_params=2_500_000_000, forward_s=0.2, backward_s=0.6)
    assert workload_from(least, "w.json") == job
    assert (job.param_bytes, job.grad_bytes, job.state_bytes) == (2, 2, 12)
    assert (job.other_s, job.h2d_busy_share, job.d2h_busy_share) == (0, 0, 0)
    assert (job.clipping, job.gpu_free) == (True, None)
    optional = ("name", "subgroup_params", "gpu_free_bytes", "state_bytes", "other_s", "h2d_busy_share", "sizes")
    assert workload_from(least | dict.fromkeys(optional), "w.json") == job


@pytest.mark.parametrize("key", ["params", "forward_s", "backward_s"])
def test_what_a_file_must_tell(key: str) -> None:
    with pytest.raises(WorkloadError, match=f"w.json has no {key}"):
        workload_from(WORKLOAD | {key: None}, "w.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            (key, value)
            for key in ("params", "subgroup_params", "forward_s", "other_s", "state_bytes", "h2d_busy_share")
            for value in (-1, 10**400, math.nan, math.inf, "1", True, [])
        ),
        ("params", 0.4),
        ("params", 1e16),
        ("subgroup_params", 0),
        ("subgroup_params", 1),
        ("state_bytes", 0),
        ("h2d_busy_share", 1),
        ("d2h_busy_share", 1.5),
        ("clipping", "no"),
        ("gpu_free_bytes", -1),
        ("gpu_free_bytes", "all"),
        ("gpu_free_bytes", [1e9]),
        ("gpu_free_bytes", [{"at_s": 0}]),
        ("gpu_free_bytes", [{"at_s": 0, "bytes": -1}]),
        ("gpu_free_bytes", [{"at_s": -1, "bytes": 1}]),
        ("gpu_free_bytes", {"at_s": 0, "bytes": 1}),
        ("sizes", [10**9, 10**9 - 1]),
        ("sizes", [2e9, 0]),
        ("sizes", [3 * 10**9, -(10**9)]),
        ("sizes", 2e9),
    ],
)
def test_values_that_no_workload_has_are_refused(key: str, value: Any) -> None:
    with pytest.raises(WorkloadError, match=r"w\.json: ") as found:
        workload_from(WORKLOAD | {key: value}, "w.json")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("content", ["", '{"params": 2e9, "forw', "[2e9]", '{"params": Infinity}'])
def test_files_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "w.json").write_text(content)
    with pytest.raises(WorkloadError, match=r"workload file .*w\.json is not"):
        load_workload(tmp_path / "w.json")


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_subgroups_are_alike_but_the_last(params: int, size: int) -> None:
    job = workload(params=params, subgroup_params=size)
    assert sum(job.subgroups) == params
    assert len(job.subgroups) == math.ceil(params / min(size, params))
    assert set(job.subgroups[:-1]) <= {size}
    assert 0 < job.subgroups[-1] <= size


def test_recorded_subgroups_are_taken_as_they_are() -> None:
    assert workload(params=10, subgroup_params=5, sizes=[7, 3]).subgroups == (7, 3)


def test_what_is_free_is_a_step_function() -> None:
    line = [{"at_s": 0.5, "bytes": 3e9}, {"at_s": 0.5, "bytes": 4e9}, {"at_s": 0.2, "bytes": 5e9}]
    job = workload(gpu_free_bytes=line)
    # In order; before the first entry nothing is known to be free; of two at one time the later entry counts.
    assert {at: job.free_at(at) for at in (0.0, 0.1, 0.2, 0.49, 0.5, 9.0)} == {
        0.0: 0,
        0.1: 0,
        0.2: 5e9,
        0.49: 5e9,
        0.5: 4e9,
        9.0: 4e9,
    }
    assert job.least_free == 0
    assert job.gpu_free_from(0.3) == ((0.3, 5e9), (0.5, 3e9), (0.5, 4e9))
    always = workload(gpu_free_bytes=7e9)
    assert (always.free_at(0), always.least_free) == (7e9, 7e9)
    unknown = workload(gpu_free_bytes=[])
    assert (unknown.gpu_free, unknown.free_at(0), unknown.least_free) == (None, None, None)


@given(workloads(), st.floats(0, 1.5))
def test_the_free_line_from_a_time_on_tells_the_same(job: Workload, share: float) -> None:
    begin = share * job.compute_s
    rest = replace(job, gpu_free=job.gpu_free_from(begin))
    assert (job.gpu_free or ())[0][0] == 0
    for later in (begin, begin + 0.01, 2 * job.compute_s):
        assert rest.free_at(later) == job.free_at(later)
    assert job.least_free is not None
    assert rest.least_free is not None
    assert rest.least_free >= job.least_free


def test_a_size_is_a_workload() -> None:
    job = find_workload(None, None, Size(13_000_000_001, 4, 0.2, 0.6), 10**10)
    assert (job.name, job.params, len(job.subgroups)) == ("13 G parameters on 4 ranks", 3_250_000_001, 33)
    assert (job.forward_s, job.backward_s, job.gpu_free, job.notes) == (0.2, 0.6, ((0, 1e10),), ())
    bare = workload_of_size(Size(10**9))
    assert (bare.name, bare.gpu_free) == ("1 G parameters on 1 rank", None)
    assert bare.notes == ("forward and backward are not known: only the update is replayed",)


def test_a_workload_comes_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text(json.dumps(WORKLOAD))
    assert find_workload(None, file) == replace(workload(), name="job")
    for sources in ((None, None, None), (tmp_path, file, None), (None, file, Size(10**9))):
        with pytest.raises(WorkloadError, match="one of the three"):
            find_workload(*sources)
    for size in (Size(0), Size(10**9, 0)):
        with pytest.raises(WorkloadError, match="must be at least 1"):
            find_workload(None, None, size)
