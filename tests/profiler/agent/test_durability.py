"""The trace of a killed job, of a crashed rank and of a full disk."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ebbtide.profiler import open_trace
from tests.conftest import (
    Recorded,
    ebbtide,
    ebbtide_in_process,
    run_process,
    running_process,
    slow_case,
)
from tests.profiler.agent.jobs import PLAIN, PRELUDE

Record = Callable[..., Recorded]

# Prints the wall time at the end of each step, and never ends by itself.
ENDLESS = PRELUDE + textwrap.dedent(
    """
    import time
    for step in range(10**6):
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, time.monotonic(), flush=True)
        time.sleep(0.02)
    """
)


def test_recorder__keeps_all_but_the_last_second_of_a_killed_job(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job.py"
    job.write_text(ENDLESS)
    path = tmp_path / "run.ebb"
    command = [
        sys.executable,
        "-m",
        "ebbtide",
        "profile",
        "-o",
        str(path),
        "--",
        sys.executable,
        str(job),
    ]
    with running_process(command) as process:
        assert process.stdout is not None
        ends: dict[int, float] = {}
        old_steps: set[int] = set()
        # However slow the machine is.
        while len(old_steps) < 20:
            step, end_s = process.stdout.readline().split()
            ends[int(step)] = float(end_s)
            old_steps = {step for step, end in ends.items() if end < float(end_s) - 1}
        collector = json.loads((path / "spool" / "recording.lock").read_text())[
            "collector"
        ]
        os.kill(collector, signal.SIGKILL)
        os.killpg(process.pid, signal.SIGKILL)
        killed_s = time.monotonic()
    trace = open_trace(path)
    assert trace.meta.state == "recording"
    recorded = set(trace.phases(0)["iteration"].dropna())
    assert (
        old_steps | {step for step, end in ends.items() if end < killed_s - 1}
        <= recorded
    )
    assert any("its recording has no end" in note for note in trace.notes)
    # Reading it again, and by the commands, gives the same.
    summary = json.loads(ebbtide_in_process("summary", path, "--json").stdout)
    assert summary["iterations"] == len(recorded)
    assert any("not finished" in remark for remark in summary["remarks"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 128 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = run_process(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder])
    if mount.returncode:
        pytest.skip("only root can mount a small tmpfs to fill")
    yield folder
    assert run_process(["umount", "--lazy", folder]).returncode == 0


@pytest.mark.slow
def test_recorder__stops_at_a_full_disk_and_the_job_goes_on(
    small_disk: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job.py"
    job.write_text(ENDLESS.replace("10**6", "700").replace("0.02", "0.002"))
    path = small_disk / "run.ebb"
    run = ebbtide("profile", "--poll", "1", "-o", path, "--", sys.executable, job)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 700
    closing = ("ebbtide: trace:", "ebbtide: recorded:", "ebbtide: next:")
    warnings = [
        text for text in run.stderr.splitlines() if not text.startswith(closing)
    ]
    assert len(warnings) == 1, run.stderr
    assert "no space left" in warnings[0].lower()
    iterations = open_trace(path).phases(0)["iteration"].dropna()
    assert 20 < iterations.nunique() < 700
    assert (
        json.loads(ebbtide_in_process("summary", path, "--json").stdout)["iterations"]
        == iterations.nunique()
    )


@pytest.mark.parametrize(
    "path", ["/proc/nothing/run.ebb", slow_case("/dev/null/run.ebb")]
)
def test_profile__reports_an_unwritable_output_in_one_line(path: str) -> None:
    run = ebbtide("profile", "-o", path, "--", "true")
    assert run.returncode == 2
    assert run.stderr.startswith(f"ebbtide: cannot write {path}")
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.slow
def test_profile__keeps_only_the_requested_iterations(record: Record) -> None:
    recorded = record(
        PRELUDE + PLAIN.replace("STEPS", "12"), options=("--iterations", "4:7")
    )
    trace = recorded.trace
    phases = trace.phases(0)
    assert list(phases["iteration"]) == [4, 4, 4, 5, 5, 5, 6, 6, 6]
    begin = trace.rank(0).first_iteration_start_ns
    assert begin < phases["start_ns"].min()
    assert trace.memory(0)["t_ns"].between(begin, phases["end_ns"].max()).all()
    summary = json.loads(ebbtide_in_process("summary", recorded.path, "--json").stdout)
    assert summary["iterations"] == 3
    assert summary["warmup_iterations"] == 0


@pytest.mark.slow
def test_recorder__stops_at_max_size_and_the_job_goes_on(record: Record) -> None:
    recorded = record(
        ENDLESS.replace("10**6", "300").replace("0.02", "0.002"),
        options=("--max-size", "20KB"),
    )
    assert recorded.run.returncode == 0
    assert len(recorded.run.stdout.splitlines()) == 300
    assert "--max-size" in recorded.run.stderr
    assert 5 < len(recorded.phases()) < 300


@pytest.mark.slow
def test_recorder__agrees_with_the_clock_of_the_script(record: Record) -> None:
    recorded = record(ENDLESS.replace("10**6", "30"))
    script_ends = [
        float(output.split()[1]) for output in recorded.run.stdout.splitlines()
    ]
    ends = (
        recorded.trace.phases(0).groupby("iteration")["end_ns"].max().to_numpy() / 1e9
    )
    assert np.median(np.diff(ends)) == pytest.approx(
        np.median(np.diff(script_ends)), rel=0.05
    )
    assert ends[-1] - ends[0] == pytest.approx(
        script_ends[-1] - script_ends[0], rel=0.05
    )
