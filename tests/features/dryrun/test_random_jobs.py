"""Random training loops: the peak of a dry run is that of an eager run, to the byte."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FAST, _SLOW = 8, 120


def check_jobs(first: int, last: int) -> None:
    """Compare the jobs of some seeds, in a process that has trained nothing before."""
    module = "tests.features.dryrun.random_jobs"
    words = [sys.executable, "-m", module, str(first), str(last)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"0 of {last - first} differ\n"


def test_dry_run__has_the_peaks_of_eager_runs() -> None:
    check_jobs(0, _FAST)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_dry_run__has_the_peaks_of_many_eager_runs() -> None:
    check_jobs(_FAST, _SLOW)
