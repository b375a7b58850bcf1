"""`profile -o URL`: what is at the URL while the job runs, after it, and after its node
is lost; what is here where it cannot be uploaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow import fs

from ebbtide.errors import TraceError
from ebbtide.features.remote.file_systems import arrow_file_system
from ebbtide.profiler.trace import open_trace
from tests.conftest import PROCESS_TIMEOUT_S, ebbtide, phases_of
from tests.features.remote.servers import BUCKET, Connection

JOB = """
import pathlib, sys, time, torch
pathlib.Path("began").touch()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a job, and one for files that a recording leaves here."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "spools").mkdir()
    os.environ["TMPDIR"] = str(tmp_path / "spools")
    return tmp_path


def profile_words(url: str, steps: int, pause_s: float, *options: str) -> list[str]:
    job = [sys.executable, "job.py", str(steps), str(pause_s)]
    return ["profile", "-o", url, *options, "--", *job]


def names(url: str) -> list[str]:
    """Return the files at a URL."""
    path = url.removeprefix("s3://")
    selected = fs.FileSelector(path, allow_not_found=True, recursive=True)
    files = arrow_file_system("s3").get_file_info(selected)
    return sorted(
        info.path.removeprefix(f"{path}/")
        for info in files
        if info.type == fs.FileType.File
    )


def test_profile__uploads_a_trace(connection: Connection, folder: Path) -> None:
    url = f"s3://{BUCKET}/new/run.ebb"
    run = ebbtide(*profile_words(url, 4, 0), cwd=folder)
    assert run.returncode == 0, run.stderr
    assert f"trace: {url}, 4 iterations on 1 rank" in run.stderr
    trace = open_trace(url)
    assert trace.meta.state == "complete"
    assert phases_of(trace) == [["forward", "backward", "update"]] * 4
    assert not [name for name in names(url) if name.startswith("spool")]
    assert not [*(folder / "spools").glob("ebbtide-*")]
    (folder / "began").unlink()
    again = ebbtide(*profile_words(url, 4, 0), cwd=folder)
    assert again.returncode == 2
    assert again.stderr == (
        f"ebbtide: {url} exists already: choose another -o, or replace it (--force)\n"
    )
    assert not (folder / "began").exists()
    assert not [*(folder / "spools").glob("ebbtide-*")]


@pytest.mark.slow
def test_profile__replaces_a_trace_if_forced(
    connection: Connection, folder: Path
) -> None:
    url = f"s3://{BUCKET}/forced/run.ebb"
    for steps in (3, 5):
        run = ebbtide(*profile_words(url, steps, 0, "--force"), cwd=folder)
        assert run.returncode == 0, run.stderr
        assert len(phases_of(open_trace(url))) == steps


@pytest.mark.slow
def test_profile__of_a_lost_node_opens_from_what_it_had_copied(
    connection: Connection, folder: Path
) -> None:
    url = f"s3://{BUCKET}/lost/run.ebb"
    environment = {**os.environ, "EBBTIDE_UPLOAD_SECONDS": "0.2"}
    words = [sys.executable, "-m", "ebbtide", *profile_words(url, 10_000, 0.01)]
    with subprocess.Popen(words, cwd=folder, env=environment) as job:
        try:
            wait_for(lambda: len(names(url)) > 8)
            seen = len(phases_of(open_trace(url)))
            wait_for(lambda: len(phases_of(open_trace(url))) > seen)
        finally:
            # As if the node had gone: neither the job nor its collector finishes.
            for pid in collectors(folder):
                os.kill(pid, signal.SIGKILL)
            job.kill()
    trace = open_trace(url)
    assert trace.meta.state == "recording"
    assert trace.meta.ranks[0].stopped == "cut off"
    assert set(map(tuple, phases_of(trace)[:-1])) == {("forward", "backward", "update")}


def wait_for(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + PROCESS_TIMEOUT_S / 4
    while True:
        try:
            if condition():
                return
        except TraceError:
            pass
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.1)


def collectors(folder: Path) -> list[int]:
    """Return the collectors that record into a folder."""
    locks = (folder / "spools").rglob("recording.lock")
    return [
        int(lock.read_text().partition('"collector": ')[2].strip("}")) for lock in locks
    ]


def test_profile__does_not_begin_where_nothing_can_be_written(
    connection: Connection, folder: Path
) -> None:
    run = ebbtide(*profile_words("s3://no-bucket/run.ebb", 4, 0), cwd=folder)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert not (folder / "began").exists()
    assert not [*(folder / "spools").glob("ebbtide-*")]
    run = ebbtide(*profile_words("https://host/run.ebb", 4, 0), cwd=folder)
    assert run.stderr == (
        "ebbtide: https://host/run.ebb: https:// is read only, and lists no files: "
        "recordings are at s3:// or gs://\n"
    )


@pytest.mark.slow
def test_profile__keeps_a_trace_that_cannot_be_uploaded(
    connection: Connection, folder: Path
) -> None:
    url = f"s3://{BUCKET}/kept/run.ebb"
    words = [sys.executable, "-m", "ebbtide", *profile_words(url, 100, 0.01)]
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True) as job:
        wait_for((folder / "began").exists)
        connection.close_all()
        _, stderr = job.communicate(timeout=PROCESS_TIMEOUT_S)
    assert job.returncode == 0
    stderr = " ".join(stderr.split())
    assert f"{url}/" in stderr
    assert "the trace is still here, as below" in stderr
    (kept,) = (folder / "spools").glob("*/run.ebb")
    assert len(phases_of(open_trace(kept))) == 100
    assert f"trace: {kept}, 100 iterations on 1 rank" in stderr
