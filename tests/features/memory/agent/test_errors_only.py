"""Out-of-memory errors without `ebbtide profile`: EBBTIDE_OOM, and
`record_out_of_memory`, in real jobs on the CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ebbtide.profiler import open_trace
from ebbtide.profiler.agent import process_recorder
from ebbtide.profiler.trace import schema
from tests.conftest import Run, ebbtide_in_process, run_process
from tests.features.memory.agent.test_out_of_memory import JOB
from tests.profiler.agent.test_isolation import PROFILER

# The line that Python runs at its start where ebbtide is installed.
AT_START = f"exec(open({str(PROFILER / 'inject' / 'ebbtide-agent.pth')!r}).read())\n"


def run_job(folder: Path, job: str, trace: str | None) -> Run:
    (folder / "job.py").write_text(job)
    environment = {**os.environ, **({} if trace is None else {"EBBTIDE_OOM": trace})}
    return run_process([sys.executable, "job.py"], cwd=folder, env=environment)


def test_errors_only__writes_what_memory_at_oom_reads(tmp_path: Path) -> None:
    run = run_job(tmp_path, AT_START + JOB, "logs/oom.ebb")
    assert (run.returncode, run.stdout, "ebbtide" in run.stderr) == (1, "", False)
    assert "Traceback" in run.stderr
    trace = open_trace(tmp_path / "logs" / "oom.ebb")
    _, in_forward = trace.rank(0).out_of_memory
    assert (in_forward.phase, in_forward.iteration, in_forward.requested_bytes) == (
        "forward",
        2,
        2 << 30,
    )
    assert trace.meta.notes[0] == "only out-of-memory errors were recorded"
    assert not len(trace.phases(0))
    answer = json.loads(
        ebbtide_in_process(
            "memory", "logs/oom.ebb", "--at", "oom", "--json", cwd=tmp_path
        ).stdout
    )
    sizes = {(h["category"], h["module"]): h["bytes"] for h in answer["holders"]}
    assert (
        sizes["optimizer_state", "1.inner"]
        == sizes["parameter", "1.inner"]
        == 4 * (32 * 32 + 32)
    )
    assert sum(sizes.values()) == answer["bytes"]
    assert "in forward of iteration 2" in " ".join(
        ebbtide_in_process(
            "memory", "logs/oom.ebb", "--at", "oom", cwd=tmp_path
        ).stdout.split()
    )


@pytest.mark.slow
def test_errors_only__writes_beside_the_traces_of_other_runs(tmp_path: Path) -> None:
    for _ in range(2):
        run_job(tmp_path, AT_START + JOB, "logs/oom.ebb")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "oom-2.ebb",
        "oom.ebb",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["/proc/nowhere/oom.ebb", "job.py/oom.ebb", ""])
def test_errors_only__leaves_a_job_alone_where_nothing_can_be_written(
    tmp_path: Path, trace: str
) -> None:
    bare, run = (run_job(tmp_path, AT_START + JOB, name) for name in (None, trace))
    assert (run.returncode, run.stdout, run.stderr) == (
        bare.returncode,
        bare.stdout,
        bare.stderr,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


@pytest.mark.slow
def test_errors_only__writes_nothing_without_an_error_and_lets_a_tracer_record(
    tmp_path: Path,
) -> None:
    job = """
import torch
from ebbtide.profiler import Tracer
from ebbtide.profiler.callbacks import record_out_of_memory
record_out_of_memory("oom.ebb")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
step()
with Tracer("run.ebb") as tracer:
    step()
assert len(tracer.trace.phases(0)) == 3
"""
    run = run_job(tmp_path, job, None)
    assert (run.returncode, run.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"job.py", "run.ebb"}


def test_errors_only__writes_the_format_of_traces() -> None:
    assert {"format": schema.FORMAT, "schema": schema.SCHEMA} == process_recorder.FORMAT
    assert process_recorder.SPOOL == schema.SPOOL
