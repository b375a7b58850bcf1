"""Finishes a recording: converts its spools into the tables of one trace per training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbtide.profiler.trace.files import drop_ranks, drop_spools, new_trace, read_meta, write_meta, write_rank
from ebbtide.profiler.trace.recovery import recovered_traces
from ebbtide.profiler.trace.schema import TABLES
from ebbtide.profiler.trace.trace import Trace


def finish(path: Path, changes: dict[str, Any]) -> list[Trace]:
    """Convert the spools of a recording into tables, then delete the spools.

    Args:
        path: A trace that is being recorded.
        changes: Keys to set in meta.json.

    Returns:
        The finished trace, and one more for each further training that the command ran: RUN-2.ebb, RUN-3.ebb, ...

    Raises:
        OSError: No space is left. The trace is unchanged and still opens from its spools.
    """
    first, *others = recovered_traces(path, read_meta(path) | changes)
    for other in others:
        with new_trace(other.path):
            _write(other.path, other)
    try:
        finished = _write(path, first)
    except OSError:
        drop_ranks(path, first.ranks)
        raise
    drop_spools(path)
    return [finished, *others]


def _write(path: Path, trace: Trace) -> Trace:
    finished = {**trace.raw_meta, "state": "complete"}
    for rank in trace.ranks:
        write_rank(path, rank, {table: trace.table(rank, table) for table in TABLES})
    write_meta(path, finished)
    return Trace(path, finished, trace.table)
