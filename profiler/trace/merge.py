"""Merging the traces that the hosts of one job recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbtide.errors import TraceError
from ebbtide.profiler.trace.files import new_trace, write_meta, write_rank
from ebbtide.profiler.trace.reader import Trace, open_trace
from ebbtide.profiler.trace.schema import TABLES

_TIMES = ("start_ns", "end_ns", "gpu_start_ns", "gpu_end_ns", "t_ns")


def merge(traces: Sequence[Trace], output: Path, force: bool = False) -> Trace:
    """Write one trace with the ranks of all, on the monotonic clock of the first trace's host.

    Each host's clock is placed by its wall-clock offset, so ranks of different hosts are as well aligned as
    the hosts' wall clocks are (NTP: about a millisecond). Raises TraceError where two traces hold the same rank.
    """
    seen: dict[int, Path] = {}
    for trace in traces:
        for rank in trace.ranks:
            if rank in seen:
                raise TraceError(f"{seen[rank]} and {trace.path} both hold rank {rank}: they are not of one job")
            seen[rank] = trace.path
    first = traces[0]
    entries, parts = [], {}
    for trace in traces:
        shift = _wall_offset(trace) - _wall_offset(first)
        for rank in trace.ranks:
            tables = {table: trace.table(rank, table).copy() for table in TABLES}
            for frame in tables.values():
                for column in set(_TIMES) & set(frame.columns):
                    frame[column] += shift
            parts[rank] = tables
            entries.append(_shifted(trace.rank(rank), shift))
    hosts = [trace.meta.get("host", {}).get("name") for trace in traces]
    notes = [note for trace in traces for note in trace.notes]
    meta = {
        **first.meta,
        "state": "complete",
        "hosts": hosts,
        "ranks": sorted(entries, key=lambda entry: int(entry["rank"])),
        "notes": notes,
    }
    with new_trace(output, force):
        for rank, tables in parts.items():
            write_rank(output, rank, tables)
        write_meta(output, meta)
    return open_trace(output)


def _wall_offset(trace: Trace) -> int:
    try:
        return int(trace.meta["clock"]["wall_offset_ns"])
    except (KeyError, TypeError, ValueError):
        raise TraceError(f"{trace.path} does not tell its clock's offset: it cannot be merged") from None


def _shifted(entry: dict[str, Any], shift: int) -> dict[str, Any]:
    shifted = {
        key: entry[key] + shift for key in ("started_ns", "first_iteration_start_ns") if entry.get(key) is not None
    }
    return {**entry, **shifted}
