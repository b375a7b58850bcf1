"""Tests of the DeepSpeed setup in a trace's metadata."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.metrics.deepspeed_setup import deepspeed_of, resident_subgroups, version_numbers
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job


def test_deepspeed_of__reads_recorded_job() -> None:
    job = deepspeed_of(deepspeed_job(sizes=(3, 2, 1), ratio=0.5, devices=("cuda", "cpu", "cpu:0")).build())
    assert job is not None
    assert (job.info.version, job.stage, job.ratio) == ("0.19.8", 3, 0.5)
    assert (job.subgroups, job.on_cpu, job.real_ratio, job.cpu_share) == ((3, 2, 1), (False, True, True), 0.5, 0.5)
    assert (job.info.masters_pinned, job.info.gradients_pinned, job.info.policy) == (False, True, None)
    assert job.zero_config["offload_optimizer"] == job.offload_config


ROUNDINGS = [
    (1.0, 5, 0, 0),
    (0.0, 5, 5, 5),
    (0.5, 5, 2, 3),
    (0.3, 10, 7, 7),
    (0.9, 10, 0, 1),
    (0.5, 1, 0, 1),
    (0.5, 31, 15, 16),
    (0.8, 31, 6, 7),
]


def test_resident_subgroups__rounds_as_deepspeed_does() -> None:
    """(1 - 0.9) * 10 is just less than 1; the published logs are of 0.13.3 with 31 subgroups."""
    for ratio, count, resident, resident_before_0_18 in ROUNDINGS:
        for version in (None, "0.18.0", "0.19.8", "1.0", "unknown"):
            assert resident_subgroups(ratio, count, version) == resident
        for version in ("0.12.3", "0.13.3+895a05c1", "0.17.6"):
            assert resident_subgroups(ratio, count, version) == resident_before_0_18


@pytest.mark.parametrize(("version", "ratio"), [("0.19.8", 5 / 6), ("0.13.3", 1 / 6)])
def test_rounded_ratio__follows_the_version(version: str, ratio: float) -> None:
    job = deepspeed_of(deepspeed_job(sizes=(1, 2, 3), ratio=0.6, devices=("cpu",), version=version).build())
    assert job is not None
    assert (job.real_ratio, job.rounded_ratio) == (None, pytest.approx(ratio))


VERSIONS = [
    (None, ()),
    ("", ()),
    ("unknown", ()),
    ("0.13.3+895a05c1", (0, 13, 3)),
    ("0.19", (0, 19)),
    ("1.2.dev0", (1, 2)),
]


def test_version_numbers__reads_the_leading_numbers() -> None:
    for version, numbers in VERSIONS:
        assert version_numbers(version) == numbers


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
def test_deepspeed_of__ignores_values_of_wrong_type(meta: dict[str, Any]) -> None:
    job = deepspeed_of(TraceBuilder(deepspeed=meta).build())
    assert job is not None
    assert (job.info.version, job.stage, job.ratio, job.subgroups, job.on_cpu) == (None, None, None, (), ())
    assert (job.real_ratio, job.cpu_share, job.info.masters_pinned) == (None, 1.0, None)


def test_deepspeed_of__ignores_devices_of_other_subgroups() -> None:
    job = deepspeed_of(deepspeed_job(sizes=(SIZE,), devices=("cpu", "cuda"), ratio=0.25).build())
    assert job is not None
    # DeepSpeed splits between whole subgroups: its only one is on the CPU.
    assert (job.subgroups, job.on_cpu, job.cpu_share) == ((SIZE,), (), 1.0)


def test_deepspeed_of__is_none_for_other_jobs() -> None:
    assert deepspeed_of(TraceBuilder().build()) is None
