"""Reads the traces of a recording that is not finished from its spools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from ebbtide.profiler.trace.schema import SPOOL, TABLES
from ebbtide.profiler.trace.spools import recover
from ebbtide.profiler.trace.trace import Trace
from ebbtide.profiler.trace.trainings import Training, note_other_trainings


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
    """Return the trace of one training of a recording.

    Args:
        path: The path of the trace.
        meta: The object of the recording's meta.json.
        training: The data of its ranks.
    """
    tables = {(data.meta["rank"], table): data.tables[table] for data in training.ranks for table in TABLES}
    notes = [*meta.get("notes", []), *training.notes]
    meta = {**meta, "ranks": [data.meta for data in training.ranks], "notes": notes}
    # The first rank's: the others have the same configuration.
    sections = [section for data in training.ranks if isinstance(section := data.meta.pop("deepspeed", None), dict)]
    if sections:
        meta["deepspeed"] = sections[0]
    return Trace(path, meta, lambda rank, table: tables[rank, table])
