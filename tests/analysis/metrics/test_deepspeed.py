"""What a trace's meta tells of DeepSpeed, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.metrics.deepspeed import deepspeed_of, resident
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job


def test_a_recorded_job() -> None:
    job = deepspeed_of(deepspeed_job(sizes=(3, 2, 1), ratio=0.5, devices=("cuda", "cpu", "cpu:0")).build())
    assert job is not None
    assert (job.version, job.stage, job.ratio) == ("0.19.8", 3, 0.5)
    assert (job.subgroups, job.on_cpu, job.real_ratio, job.cpu_share) == ((3, 2, 1), (False, True, True), 0.5, 0.5)
    assert (job.masters_pinned, job.gradients_pinned, job.policy) == (False, True, None)
    assert job.zero["offload_optimizer"] == job.offload


@pytest.mark.parametrize(
    ("ratio", "count", "kept"),
    [(1.0, 5, 0), (0.0, 5, 5), (0.5, 5, 2), (0.3, 10, 7), (0.9, 10, 0), (0.5, 1, 0)],
)
def test_deepspeed_rounds_what_stays_down(ratio: float, count: int, kept: int) -> None:
    """(1 - 0.9) * 10 is just less than 1."""
    assert resident(ratio, count) == kept


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"config": []},
        {"config": {"zero_optimization": "auto"}, "stage": "three", "version": 5},
        {"subgroup_params": [1, -1], "subgroup_devices": ["cpu", "cpu"]},
        {"subgroup_params": "many", "subgroup_devices": 5, "masters_pinned": "no"},
        {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}}},
    ],
)
def test_what_is_not_of_its_kind_is_not_told(meta: dict[str, Any]) -> None:
    job = deepspeed_of(TraceBuilder(deepspeed=meta).build())
    assert job is not None
    assert (job.version, job.stage, job.ratio, job.subgroups, job.on_cpu) == (None, None, None, (), ())
    assert (job.real_ratio, job.cpu_share, job.masters_pinned) == (None, 1.0, None)


def test_devices_of_other_subgroups_do_not_count() -> None:
    job = deepspeed_of(deepspeed_job(sizes=(SIZE,), devices=("cpu", "cuda"), ratio=0.25).build())
    assert job is not None
    assert (job.subgroups, job.on_cpu, job.cpu_share) == ((SIZE,), (), 0.25)


def test_other_jobs_have_none() -> None:
    assert deepspeed_of(TraceBuilder().build()) is None
