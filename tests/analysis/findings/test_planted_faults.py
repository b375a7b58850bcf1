"""Faults that `benchmarks/faults.py` plants in recorded traces and in the command of a
job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import run_process

QUICK = (
    "locked memory",
    "many ranks",
    "blocking copies",
    "pageable copies",
    "hot GPU",
    "swap",
    "remote NUMA node",
)


@pytest.mark.slow
def test_faults__are_named_and_healthy_traces_raise_no_alarm() -> None:
    healthy = ("host", "h100-20b-async", "a100-13b-async", "a100-torch-profiler")
    run = run_process(
        [
            sys.executable,
            Path(__file__).parents[3] / "benchmarks" / "faults.py",
            "--only",
            *QUICK,
            *healthy,
        ]
    )
    assert run.returncode == 0, run.stderr
    assert (
        f"{len(QUICK)} of {len(QUICK)} faults named, 0 false alarms on {len(healthy)} "
        "healthy jobs" in run.stdout
    )
