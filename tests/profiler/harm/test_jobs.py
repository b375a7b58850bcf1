"""Jobs of every kind, each run bare and recorded: the same exit code, output and
errors, and the phases it has run."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ebbtide.profiler.trace import open_trace
from tests.conftest import Run, phases_of, slow
from tests.profiler.harm.jobs import JOBS
from tests.profiler.harm.programs import job_lines, profile_command, run_bare

QUICK = ("keyword arguments with names of the recorder",)
# What differs from run to run: times, dates, addresses, numbers of processes and ports.
VARIABLE = re.compile(
    r"\d+\.\d+s\b|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d[.,\d]*|0x[0-9a-f]{8,}|(?<=[DIWE])\d{4} [\d:.]+ \d+|pid[ =:]+\d+"
    r"|'train_(runtime|\w+_per_second)': '?[\d.e-]+'?"
)


@pytest.mark.parametrize("name", slow(JOBS, QUICK))
def test_profile__changes_nothing_of_a_job(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    job = JOBS[name]
    if find_spec(job.needs) is None:
        pytest.skip(f"needs {job.needs}")
    if job.needs == "deepspeed":
        request.getfixturevalue("deepspeed_extensions")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.py").write_text(job.text)
    bare = run_bare(*job.command, cwd=folder)
    profiled = run_bare(
        *profile_command(tmp_path / "run.ebb", *job.command), cwd=folder
    )
    assert profiled.returncode == bare.returncode, profiled.stderr
    assert _output(profiled, job.ranks) == _output(bare, job.ranks)
    trace = open_trace(tmp_path / "run.ebb")
    assert trace.ranks == list(range(job.ranks))
    for rank in trace.ranks:
        assert [tuple(phases) for phases in phases_of(trace, rank)] == list(
            job.iterations
        )


def _output(run: Run, ranks: int) -> tuple[list[str], list[str]]:
    """Return the lines of stdout and stderr that a job wrote; those of several ranks
    are sorted."""
    stdout, stderr = (
        _timeless(lines) for lines in (run.stdout.splitlines(), job_lines(run.stderr))
    )
    return (stdout, stderr) if ranks == 1 else (sorted(stdout), sorted(stderr))


def _timeless(lines: list[str]) -> list[str]:
    return [VARIABLE.sub("...", line) for line in lines]
