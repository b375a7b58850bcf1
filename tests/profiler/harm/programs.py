"""Training programs, and functions that run them bare and under `ebbtide profile`."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ebbtide.profiler.trace import open_trace
from tests.conftest import Run, ebbtide, phases_of, run_process
from tests.profiler.agent.jobs import PRELUDE

# Defines `train(steps)`, which returns the last loss. It imports torch and creates a
# model, and runs nothing yet.
TRAINING = (
    PRELUDE
    + """
import os, sys
def train(steps):
    for _ in range(steps):
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
"""
)

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def training_program(folder: Path, body: str, name: str = "job.py") -> Path:
    """Write a script that defines `train` and runs `body`."""
    file = folder / name
    file.write_text(TRAINING + textwrap.dedent(body))
    return file


def profile_command(
    output: str | Path, *command: str | Path, options: Sequence[str] = ()
) -> list[str]:
    """Return the command that records `command` into `output`, with options of `ebbtide
    profile`."""
    return [
        sys.executable,
        "-m",
        "ebbtide",
        "profile",
        *options,
        "-o",
        str(output),
        "--",
        *map(str, command),
    ]


def run_bare(*command: str | Path, cwd: Path) -> Run:
    """Run a command with one thread for torch."""
    return run_process(command, cwd=cwd, env={**os.environ, **ONE_THREAD})


def run_profiled(
    *command: str | Path, cwd: Path, output: str | Path = "run.ebb"
) -> Run:
    """Record a command with one thread for torch."""
    return ebbtide("profile", "-o", output, "--", *command, cwd=cwd)


def iterations_of(trace: Path, rank: int = 0) -> int:
    """Return the number of finished iterations of a trace."""
    return len(phases_of(open_trace(trace), rank))


def trace_names(folder: Path) -> list[str]:
    """Return the names of the traces in a folder."""
    return sorted(path.name for path in folder.glob("*.ebb"))


def job_lines(stderr: str) -> list[str]:
    """Return the lines of stderr that the job wrote."""
    return [line for line in stderr.splitlines() if not line.startswith("ebbtide: ")]


def ebbtide_lines(stderr: str) -> list[str]:
    """Return the lines of stderr that `ebbtide profile` wrote."""
    return [line for line in stderr.splitlines() if line.startswith("ebbtide: ")]
