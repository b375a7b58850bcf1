"""Slices of real jobs: several ranks that were forked, and `ebbtide profile --attach`
as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbtide.errors import TraceError
from ebbtide.features.slices.attach import AttachedSlice, attach
from ebbtide.profiler import open_trace
from ebbtide.profiler.trace.files import is_locked
from tests.conftest import running_process
from tests.profiler.agent.jobs import PRELUDE

TIMEOUT_S = 120.0

# Two ranks, forked by a process that has imported torch. They train until a file
# exists.
TWO_RANKS = (
    PRELUDE
    + """
import os, sys, time
import torch.distributed as dist
rank = 0 if os.fork() else 1
os.environ.update(RANK=str(rank), WORLD_SIZE="2")
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
stop = torch.zeros(1)
while not stop:
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    stop += os.path.exists("stop")
    dist.all_reduce(stop)
    time.sleep(0.005)
print("trained", flush=True)
dist.destroy_process_group()
if rank == 0:
    os.wait()
"""
)


def wait_until_trains(process: subprocess.Popen[str], path: Path, ranks: int) -> None:
    """Wait until every rank of a recorded job has recorded some iterations."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (
        sum(
            spool.stat().st_size > 4000
            for spool in (path / "spool").glob("agent-*.spool")
        )
        < ranks
    ):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def attach_after_the_first(path: Path, count: int) -> AttachedSlice:
    """Attach as soon as another slice has ended."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return attach(path, count)
        except TraceError as error:
            if "has not ended yet" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


@pytest.mark.slow
def test_attach__begins_at_the_same_iteration_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TWO_RANKS)
    path, profile = tmp_path / "run.ebb", [sys.executable, "-m", "ebbtide", "profile"]
    job = [
        "sh",
        "-c",
        f'cd "{tmp_path}" && exec "$0" "$@"',
        *profile,
        "--on-demand",
        "-o",
        str(path),
        "--",
    ]
    with running_process([*job, sys.executable, "job.py"], TIMEOUT_S) as process:
        wait_until_trains(process, path, 2)
        # Interrupted while it waits: the slice of the job is not.
        command = [*profile, "--attach", path, "--iterations", "30", "--poll", "2"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as attaching:
            while not (path / "spool" / "slice-request").is_symlink():
                assert attaching.poll() is None
                time.sleep(0.02)
            time.sleep(0.2)
            attaching.send_signal(signal.SIGINT)
            assert attaching.stderr is not None
            stderr = attaching.stderr.read()
        assert attaching.returncode == 130, stderr
        second = attach_after_the_first(path, 5)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not second.update():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert [second.recorded(rank) for rank in second.processes] == [
            (second.request.first, second.request.end)
        ] * 2
        (tmp_path / "stop").touch()
        assert process.stdout is not None
        assert process.stdout.read() == "trained\n" * 2
        assert process.wait(TIMEOUT_S) == 0
    while is_locked(path):
        time.sleep(0.02)
    trace = open_trace(path)
    assert trace.ranks == [0, 1]
    assert trace.notes == []
    slices = [
        [entry.iterations for entry in trace.rank(rank).detailed_slices]
        for rank in trace.ranks
    ]
    assert slices[0] == slices[1]
    first, last = slices[0]
    assert f"iterations {first[0]} to {first[1] - 1}" in stderr
    assert first[1] - first[0] == 30
    assert last == (second.request.first, second.request.end)
    for rank in trace.ranks:
        assert "heap" in set(trace.memory(rank)["pool"])
