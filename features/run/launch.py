"""Runs a job whose optimizers are driven, and is recorded meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ebbtide.features.run.agent.hooks import RUN
from ebbtide.features.run.options import RunOptions
from ebbtide.features.run.results import ProcessLog, read_logs
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.recording.collector import RecordedCommand
from ebbtide.profiler.recording.launch import profile_in_terminal
from ebbtide.profiler.trace.files import META


def run_job(
    words: list[str], output: Path, options: RunOptions, force: bool = False
) -> tuple[int, list[ProcessLog] | None]:
    """Run a command, whose trace is written; return its exit code and its logs.

    There are none if the job did not begin.
    It gets this process's terminal and signals, as under `ebbtide profile`.
    """
    with TemporaryDirectory(prefix="ebbtide-run-") as folder:
        job = RecordedCommand(words, output, Options(), force)
        with variables_set({RUN: replace(options, folder=folder).text()}):
            before = _written_at(output)
            code = profile_in_terminal(job)
        has_begun = _written_at(output) != before
        return code, read_logs(Path(folder)) if has_begun else None


def _written_at(trace: Path) -> int | None:
    """Return when a trace was written, in nanoseconds; None if there is none."""
    meta = trace / META
    return meta.stat().st_mtime_ns if meta.exists() else None


@contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment inside the block."""
    patches = Patches()
    patches.set_variables(values)
    try:
        yield
    finally:
        patches.undo()
