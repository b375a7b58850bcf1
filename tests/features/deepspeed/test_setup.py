"""Tests of the DeepSpeed setup in a trace's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.report.job_description import describe_job
from ebbtide.errors import TraceError
from ebbtide.features.deepspeed.setup import deepspeed_of
from ebbtide.profiler.trace import TraceBuilder, open_trace
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job
from tests.analysis.metrics.storage_jobs import SUBGROUP, swapped_job


def test_deepspeed_of__reads_recorded_job() -> None:
    job = deepspeed_of(
        deepspeed_job(
            sizes=(3, 2, 1), ratio=0.5, devices=("cuda", "cpu", "cpu:0")
        ).build()
    )
    assert job is not None
    assert (job.info.version, job.stage, job.ratio) == ("0.19.8", 3, 0.5)
    assert (job.subgroups, job.on_cpu, job.real_ratio, job.cpu_share) == (
        (3, 2, 1),
        (False, True, True),
        0.5,
        0.5,
    )
    assert (job.info.masters_pinned, job.info.gradients_pinned, job.info.policy) == (
        False,
        True,
        None,
    )
    assert job.zero_config["offload_optimizer"] == job.offload_config


@pytest.mark.parametrize(("version", "ratio"), [("0.19.8", 5 / 6), ("0.13.3", 1 / 6)])
def test_rounded_ratio__follows_the_version(version: str, ratio: float) -> None:
    job = deepspeed_of(
        deepspeed_job(
            sizes=(1, 2, 3), ratio=0.6, devices=("cpu",), version=version
        ).build()
    )
    assert job is not None
    assert (job.real_ratio, job.rounded_ratio) == (None, pytest.approx(ratio))


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"config": []},
        {"config": {"zero_optimization": "auto"}, "stage": "three", "version": 5},
        {"subgroup_params": [1, -1], "subgroup_devices": ["cpu", "cpu"]},
        {"subgroup_params": "many", "subgroup_devices": 5, "masters_pinned": "no"},
        {
            "config": {
                "zero_optimization": {
                    "offload_optimizer": {"device": "cpu", "ratio": "auto"}
                }
            }
        },
    ],
)
def test_deepspeed_of__ignores_values_of_wrong_type(meta: dict[str, Any]) -> None:
    job = deepspeed_of(TraceBuilder(deepspeed=meta).build())
    assert job is not None
    assert (job.info.version, job.stage, job.ratio, job.subgroups, job.on_cpu) == (
        None,
        None,
        None,
        (),
        (),
    )
    assert (job.real_ratio, job.cpu_share, job.info.masters_pinned) == (None, 1.0, None)


def test_deepspeed_of__ignores_devices_of_other_subgroups() -> None:
    job = deepspeed_of(
        deepspeed_job(sizes=(SIZE,), devices=("cpu", "cuda"), ratio=0.25).build()
    )
    assert job is not None
    # DeepSpeed splits between whole subgroups: its only one is on the CPU.
    assert (job.subgroups, job.on_cpu, job.cpu_share) == ((SIZE,), (), 1.0)


def test_deepspeed_of__is_none_for_other_jobs() -> None:
    assert deepspeed_of(TraceBuilder().build()) is None


def test_host_buffer_bytes__counts_buffers_and_gradients_in_host_memory() -> None:
    default = deepspeed_of(swapped_job(gradients=True))
    better = deepspeed_of(swapped_job(buffer_count=12))
    assert default is not None
    assert better is not None
    assert default.host_buffer_bytes == (4 * 4 + 4) * SUBGROUP
    assert better.host_buffer_bytes == (12 * 4 + 4 + 4) * SUBGROUP


def test_open_trace__refuses_a_malformed_section(tmp_path: Path) -> None:
    path = deepspeed_job().write(tmp_path / "run.ebb").path / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"deepspeed": "0.19.5"}))
    with pytest.raises(TraceError, match=r"damaged: deepspeed in its meta\.json"):
        open_trace(tmp_path / "run.ebb")


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (
            {"ratio": 0.5, "sizes": (SIZE,) * 3, "devices": ("cuda", "cpu", "cpu")},
            "ZeRO-3, optimizer offloaded to the cpu, a share of 0.5 configured, 0.67 "
            "real on the CPU, 3 subgroups of "
            "100 M parameters, 2 of them on the CPU, masters pageable, gradients "
            "pinned",
        ),
        (
            {
                "sizes": (SIZE, 2 * SIZE),
                "policy": "adaptive",
                "masters_pinned": True,
                "gradients_pinned": None,
            },
            "ZeRO-3, updated by ebbtide under adaptive, optimizer offloaded to the "
            "cpu, a share of 1 on the CPU, 2 "
            "subgroups of 100 M to 200 M parameters, 2 of them on the CPU, masters "
            "pinned",
        ),
    ],
)
def test_describe_job__describes_the_offload(meta: dict[str, Any], says: str) -> None:
    job = describe_job(deepspeed_job(iterations=1, **meta).build())
    assert dict(job.head)["DeepSpeed"] == says
    assert "DeepSpeed 0.19.8" in dict(job.rest)["software"]
