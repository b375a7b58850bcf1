"""Reads the traces of a recording that is not finished from its spools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from ebbtide.profiler.recording.lock import wait_until_finished
from ebbtide.profiler.recording.spools.process import recover
from ebbtide.profiler.recording.spools.trainings import Training, note_other_trainings
from ebbtide.profiler.trace.files import read_meta
from ebbtide.profiler.trace.reader import open_trace
from ebbtide.profiler.trace.schema import SPOOL, TABLES
from ebbtide.profiler.trace.trace import Trace


def unfinished_trace(path: Path) -> Trace:
    """Open a trace whose recording goes on or was cut off.

    One whose job has just ended is waited for until it is finished.
    """
    wait_until_finished(path)
    meta = read_meta(path)
    return recovered_traces(path, meta)[0] if meta.get("state") == "recording" else open_trace(path)


def recovered_traces(path: Path, meta: dict[str, Any]) -> list[Trace]:
    """Return a trace per training in the spools of a recording, read into memory.

    The first one has the path of the recording, the others have paths that do not exist yet.
    """
    trainings = recover(path / SPOOL, meta)
    paths = [path, *islice(_free_paths(path), len(trainings) - 1)]
    note_other_trainings(trainings, [free.name for free in paths])
    return [trace_of(free, meta, training) for free, training in zip(paths, trainings, strict=True)]


def _free_paths(path: Path) -> Iterator[Path]:
    """Yield RUN-2.ebb, RUN-3.ebb, ... beside RUN.ebb, as far as they do not exist."""
    for number in count(2):
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        if not os.path.lexists(free):
            yield free


def trace_of(path: Path, meta: dict[str, Any], training: Training) -> Trace:
    """Return the trace of one training of a recording."""
    tables = {(data.meta["rank"], table): data.tables[table] for data in training.ranks for table in TABLES}
    notes = [*meta.get("notes", []), *training.notes]
    meta = {**meta, "ranks": [data.meta for data in training.ranks], "notes": notes}
    # The first rank's: the others have the same configuration.
    sections = [section for data in training.ranks if isinstance(section := data.meta.pop("deepspeed", None), dict)]
    if sections:
        meta["deepspeed"] = sections[0]
    return Trace(path, meta, lambda rank, table: tables[rank, table])
