"""Tests the description of a job in the report."""

from __future__ import annotations

from ebbtide.analysis.report.job_description import describe_job
from ebbtide.profiler.trace import TraceBuilder
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


def test_describe_job__dates_an_imported_job_by_its_first_iteration() -> None:
    builder = TraceBuilder("imported", clock={"name": "unix", "wall_offset_ns": 10**9})
    builder.rank(0, first_iteration_start_ns=1_700_000_000 * 10**9)
    assert dict(describe_job(builder.build()).head) == {
        "first iteration": "2023-11-14 22:13:21 UTC"
    }
