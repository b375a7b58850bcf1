"""Tests the description of a job in the report."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.report.job_description import describe_job
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job
from tests.analysis.report.report_traces import GPU


def test_describe_job__lists_only_recorded_metadata() -> None:
    builder = TraceBuilder(
        "imported",
        command=["python", "train.py", "a b"],
        started_wall_ns=1_700_000_000 * 10**9,
        imported=[{"file": "run.log", "format": "deepspeed-log"}],
        exit={"signal": 9},
        clock={"name": "unix", "host": None},
    )
    for rank in range(2):
        builder.rank(rank, devices=[{**GPU, "device": f"cuda:{rank}"}])
    job = describe_job(builder.build())
    assert dict(job.head) == {
        "device": "2 × a GPU, 40.00 GiB, PCIe 4 x16, 32 GB/s a direction",
        "started": "2023-11-14 22:13:20 UTC",
    }
    assert dict(job.rest) == {
        "command": "python train.py 'a b'",
        "ended": "signal 9",
        "source": "imported from run.log (deepspeed-log)",
        "ranks": "2",
        "clock": "unix",
    }


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (
            {"ratio": 0.5, "sizes": (SIZE,) * 3, "devices": ("cuda", "cpu", "cpu")},
            "ZeRO-3, optimizer offloaded to the cpu, a share of 0.5 configured, 0.67 real on the CPU, 3 subgroups of "
            "100 M parameters, 2 of them on the CPU, masters pageable, gradients pinned",
        ),
        (
            {"sizes": (SIZE, 2 * SIZE), "policy": "adaptive", "masters_pinned": True, "gradients_pinned": None},
            "ZeRO-3, updated by ebbtide under adaptive, optimizer offloaded to the cpu, a share of 1 on the CPU, 2 "
            "subgroups of 100 M to 200 M parameters, 2 of them on the CPU, masters pinned",
        ),
    ],
)
def test_describe_job__describes_the_offload_of_deepspeed(meta: dict[str, Any], says: str) -> None:
    job = describe_job(deepspeed_job(iterations=1, **meta).build())
    assert dict(job.head)["DeepSpeed"] == says
    assert "DeepSpeed 0.19.8" in dict(job.rest)["software"]


def test_describe_job__dates_an_imported_job_by_its_first_iteration() -> None:
    builder = TraceBuilder("imported", clock={"name": "unix", "wall_offset_ns": 10**9})
    builder.rank(0, first_iteration_start_ns=1_700_000_000 * 10**9)
    assert dict(describe_job(builder.build()).head) == {"first iteration": "2023-11-14 22:13:21 UTC"}
