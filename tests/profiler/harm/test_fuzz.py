"""Random jobs, each run bare and recorded: the same output, files and exit status, and
a trace that opens."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebbtide.profiler.trace import open_trace
from tests.conftest import Run, examples, phases_of, run_process, seeded
from tests.profiler.harm.behaviours import Job, random_job
from tests.profiler.harm.programs import job_lines, profile_command, run_bare

# `make test-all` multiplies the number of random cases by four.
CASES = examples(15)
# The time and the process id in lines of torch's log, as in `W1122 11:43:10.441000
# 18912 torch/...`.
LOG_PREFIX = re.compile(rb"^([A-Z])\d{4} [\d:.]+ \d+ ", re.MULTILINE)


@contextmanager
def _disk(folder: Path, kib: int | None) -> Iterator[None]:
    """Mount a small file system at `folder`, if a size is given and mounting is
    possible."""
    folder.mkdir()
    mounted = kib is not None and not _mount(folder, kib).returncode
    try:
        yield
    finally:
        if mounted:
            assert run_process(["umount", "--lazy", folder]).returncode == 0


def _mount(folder: Path, kib: int) -> Run:
    return run_process(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder])


def _prepared(folder: Path, job: Job) -> Path:
    folder.mkdir()
    (folder / "job.py").write_text(job.text)
    (folder / "second.py").write_text(job.second)
    return folder


def _files(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of all files below a folder, without times of torch's log;
    None for a folder."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {
        str(path.relative_to(folder)): _timeless(path.read_bytes())
        if path.is_file()
        else None
        for path in paths
    }


def _timeless(text: bytes) -> bytes:
    return LOG_PREFIX.sub(rb"\1 ", text)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(max(CASES, 4)))
def test_profile__changes_nothing_of_a_random_job(number: int, tmp_path: Path) -> None:
    _compare_runs(number, tmp_path, on_demand=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 100 + CASES))
def test_profile__changes_nothing_of_a_random_job_with_requests_for_slices(
    number: int, tmp_path: Path
) -> None:
    _compare_runs(number, tmp_path, on_demand=True)


def _compare_runs(number: int, tmp_path: Path, on_demand: bool) -> None:
    """Run a random job bare and recorded, and compare what it wrote."""
    disk = tmp_path / "disk"
    with seeded(number) as rng:
        job = random_job(rng, disk / "run.ebb", on_demand)
        command = [sys.executable, *job.flags, "job.py"]
        # The same folder for both runs, since tracebacks name it, in whatever file
        # stderr has become.
        folder = _prepared(tmp_path / "job", job)
        bare = run_bare(*command, cwd=folder)
        bare_files = _files(folder)
        folder.rename(tmp_path / "bare")
        with _disk(disk, job.disk_kib):
            options = ["--on-demand"] if on_demand else []
            recorded = profile_command(disk / "run.ebb", *command, options=options)
            profiled = run_bare(*recorded, cwd=_prepared(folder, job))
            for path in disk.glob("*.ebb"):
                open_trace(path)
            counts = [
                len(phases_of(open_trace(path)))
                for path in disk.glob("*.ebb")
                if open_trace(path).ranks
            ]
        details = f"{job.behaviours} {job.flags} {job.disk_kib}\n{profiled.stderr}"
        assert profiled.returncode == bare.returncode, details
        assert profiled.stdout == bare.stdout, details
        stderr = "\n".join(job_lines(profiled.stderr))
        assert _timeless(stderr.encode()) == _timeless(
            "\n".join(bare.stderr.splitlines()).encode()
        ), details
        assert _files(folder) == bare_files, details
        if (
            job.keeps_count
            and job.disk_kib is None
            and "-S" not in job.flags
            and _own_iterations(bare.stdout)
        ):
            assert _own_iterations(bare.stdout) in counts, f"{counts} {details}"


def _own_iterations(stdout: str) -> int:
    """Return how many iterations the main process of a job ran, by its own count; 0 if
    its count was not printed."""
    lines = [
        line
        for line in stdout.splitlines()
        if line.startswith("iterations of the job ")
    ]
    return int(lines[-1].split()[-1]) if len(lines) == 1 else 0
