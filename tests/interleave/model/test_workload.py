"""Tests of workloads: files that are read and refused, subgroups, and free memory over
time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import WorkloadError
from ebbtide.interleave.model.workload import Workload, load_workload, workload_from
from ebbtide.interleave.replay.inputs import JobSize, resolve_workload, workload_of_size
from tests.interleave.job_files import WORKLOAD, workload
from tests.interleave.strategies import workloads


@given(workloads(), st.booleans())
def test_workload_from__reads_what_as_json_printed(
    drawn: Workload, free_known: bool
) -> None:
    job = drawn if free_known else replace(drawn, gpu_free=None, sizes=None)
    assert workload_from(json.loads(json.dumps(job.as_json())), "file") == job


def test_workload_from__fills_in_defaults() -> None:
    minimal = {"params": 2.5e9, "forward_s": 0.2, "backward_s": 0.6}
    job = Workload(
        "w.json",
        params=2_500_000_000,
        subgroup_params=2_500_000_000,
        forward_s=0.2,
        backward_s=0.6,
    )
    assert workload_from(minimal, "w.json") == job
    assert (job.param_bytes, job.grad_bytes, job.state_bytes) == (2, 2, 12)
    assert (job.other_s, job.h2d_busy_share, job.d2h_busy_share) == (0, 0, 0)
    assert (job.clipping, job.gpu_free) == (True, None)
    optional = (
        "name",
        "subgroup_params",
        "gpu_free_bytes",
        "state_bytes",
        "other_s",
        "h2d_busy_share",
        "sizes",
    )
    assert workload_from(minimal | dict.fromkeys(optional), "w.json") == job


def test_load_workload__notes_misspelled_keys_and_no_others(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text(
        json.dumps(WORKLOAD | {"gpu_free_byts": 1e9, "comment": "x", "notes": ["own"]})
    )
    note = "w.json: unknown key gpu_free_byts: did you mean gpu_free_bytes?"
    assert load_workload(file).notes == ("own", note)
    file.write_text(json.dumps(load_workload(file).as_json()))
    assert load_workload(file).notes == ("own", note)


@pytest.mark.parametrize("key", ["params", "forward_s", "backward_s"])
def test_workload_from__refuses_a_missing_required_key(key: str) -> None:
    with pytest.raises(WorkloadError, match=f"w.json has no {key}"):
        workload_from(WORKLOAD | {key: None}, "w.json")


IMPOSSIBLE = [
    *(
        (key, value)
        for key in (
            "params",
            "subgroup_params",
            "forward_s",
            "other_s",
            "state_bytes",
            "h2d_busy_share",
        )
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
]


def test_workload_from__refuses_impossible_values() -> None:
    for key, value in IMPOSSIBLE:
        with pytest.raises(WorkloadError, match=r"w\.json: ") as error:
            workload_from(WORKLOAD | {key: value}, "w.json")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", ["", '{"params": 2e9, "forw', "[2e9]", '{"params": Infinity}']
)
def test_load_workload__refuses_files_that_are_not_workloads(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "w.json").write_text(content)
    with pytest.raises(WorkloadError, match=r"workload file .*w\.json is not"):
        load_workload(tmp_path / "w.json")


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_subgroups__have_one_size_but_the_last(params: int, size: int) -> None:
    job = workload(params=params, subgroup_params=size)
    assert sum(job.subgroups) == params
    assert len(job.subgroups) == math.ceil(params / min(size, params))
    assert set(job.subgroups[:-1]) <= {size}
    assert 0 < job.subgroups[-1] <= size


def test_subgroups__are_the_recorded_sizes() -> None:
    assert workload(params=10, subgroup_params=5, sizes=[7, 3]).subgroups == (7, 3)


def test_free_at__is_a_step_function() -> None:
    steps = [
        {"at_s": 0.5, "bytes": 3e9},
        {"at_s": 0.5, "bytes": 4e9},
        {"at_s": 0.2, "bytes": 5e9},
    ]
    job = workload(gpu_free_bytes=steps)
    # Sorted by time. No memory is free before the first entry. Of two entries at one
    # time the later one counts.
    assert {time: job.free_at(time) for time in (0.0, 0.1, 0.2, 0.49, 0.5, 9.0)} == {
        0.0: 0,
        0.1: 0,
        0.2: 5e9,
        0.49: 5e9,
        0.5: 4e9,
        9.0: 4e9,
    }
    assert job.min_free_bytes == 0
    assert job.gpu_free_from(0.3) == ((0.3, 5e9), (0.5, 3e9), (0.5, 4e9))
    always = workload(gpu_free_bytes=7e9)
    assert (always.free_at(0), always.min_free_bytes) == (7e9, 7e9)
    unknown = workload(gpu_free_bytes=[])
    assert (unknown.gpu_free, unknown.free_at(0), unknown.min_free_bytes) == (
        None,
        None,
        None,
    )


@given(workloads(), st.floats(0, 1.5))
def test_gpu_free_from__equals_the_whole_from_that_time_on(
    job: Workload, share: float
) -> None:
    begin = share * job.compute_s
    later_part = replace(job, gpu_free=job.gpu_free_from(begin))
    assert (job.gpu_free or ())[0][0] == 0
    for later in (begin, begin + 0.01, 2 * job.compute_s):
        assert later_part.free_at(later) == job.free_at(later)
    assert job.min_free_bytes is not None
    assert later_part.min_free_bytes is not None
    assert later_part.min_free_bytes >= job.min_free_bytes


def test_resolve_workload__accepts_a_size() -> None:
    job = resolve_workload(None, None, JobSize(13_000_000_001, 4, 0.2, 0.6), 10**10)
    assert (job.name, job.params, len(job.subgroups)) == (
        "13 G parameters on 4 ranks",
        3_250_000_001,
        33,
    )
    assert (job.forward_s, job.backward_s, job.gpu_free, job.notes) == (
        0.2,
        0.6,
        ((0, 1e10),),
        (),
    )
    bare = workload_of_size(JobSize(10**9))
    assert (bare.name, bare.gpu_free) == ("1 G parameters on 1 rank", None)
    assert bare.notes == (
        "forward and backward are not known: only the update is replayed",
    )


def test_resolve_workload__requires_exactly_one_source(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text(json.dumps(WORKLOAD))
    assert resolve_workload(None, file) == replace(workload(), name="job")
    for sources in (
        (None, None, None),
        (tmp_path, file, None),
        (None, file, JobSize(10**9)),
    ):
        with pytest.raises(WorkloadError, match="one of the three"):
            resolve_workload(*sources)
    for size in (JobSize(0), JobSize(10**9, 0)):
        with pytest.raises(WorkloadError, match="must be at least 1"):
            resolve_workload(None, None, size)


def test_workload_from__master_as_remainder_has_10_bytes_of_state() -> None:
    minimal = {
        "params": 1e9,
        "forward_s": 0.2,
        "backward_s": 0.6,
        "master": "remainder",
    }
    job = workload_from(minimal, "w.json")
    assert (job.master, job.state_bytes, job.cpu_update_bytes) == ("remainder", 10, 26)
    assert workload_from(minimal | {"state_bytes": 10}, "w.json") == job
    for key, value in (("state_bytes", 12), ("param_bytes", 4)):
        with pytest.raises(
            WorkloadError, match=f"master is remainder and {key} {value}"
        ):
            workload_from(minimal | {key: value}, "w.json")
    with pytest.raises(
        WorkloadError,
        match='master is \'bf16\'; it must be "fp32", "parameter" or "remainder"',
    ):
        workload_from(minimal | {"master": "bf16"}, "w.json")
