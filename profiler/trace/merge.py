"""Merges the traces that the hosts of one job recorded."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ebbtide.errors import TraceError, UserError
from ebbtide.profiler.trace.files import new_trace, open_trace, write_meta, write_rank
from ebbtide.profiler.trace.schema import TABLES
from ebbtide.profiler.trace.trace import Trace
from ebbtide.units import ms_text

# What is this close counts as overlapping: monitors take a sample a second, and clocks
# of hosts differ a little.
_MAX_GAP_NS = 10**9
_TIMES = (
    "start_ns",
    "end_ns",
    "gpu_start_ns",
    "gpu_end_ns",
    "launch_ns",
    "awaited_ns",
    "t_ns",
)


def merge(
    traces: Sequence[Trace], output: Path, force: bool = False, align: str | None = None
) -> Trace:
    """Write one trace with the ranks of all, on the monotonic clock of the first
    trace's host.

    Clocks are aligned by their offsets from Unix time, so ranks of different hosts are
    aligned as well as the wall clocks of the hosts are (NTP: about a millisecond).

    Args:
        force: Replace a trace at `output`.
        align: Move the traces so that they begin at the same time: with the first one
            (`start`), or with the trace of this path. None: their clocks are used, by
            which they must overlap.

    Raises:
        TraceError: Two traces have the same rank, share no time, or lack the offset of
            their clock.
    """
    trace_of_rank: dict[int, Path] = {}
    for trace in traces:
        for rank in trace.ranks:
            if rank in trace_of_rank:
                raise TraceError(
                    f"{trace_of_rank[rank]} and {trace.path} both have rank {rank}: "
                    "they are not of one job"
                )
            trace_of_rank[rank] = trace.path
    first = traces[0]
    entries, tables_of_rank = [], {}
    for trace, shift in zip(traces, _shifts(traces, align), strict=True):
        # As they are in meta.json, with keys that the format does not specify.
        raw_entries = {
            entry["rank"]: entry for entry in reversed(trace.raw_meta["ranks"])
        }
        for rank in trace.ranks:
            tables = {table: trace.table(rank, table).copy() for table in TABLES}
            for frame in tables.values():
                for column in set(_TIMES) & set(frame.columns):
                    frame[column] += shift
            tables_of_rank[rank] = tables
            entries.append(_shifted(raw_entries[rank], shift))
    hosts = [trace.meta.host.name for trace in traces]
    notes = [note for trace in traces for note in trace.notes]
    meta = {
        **first.raw_meta,
        "state": "complete",
        "hosts": hosts,
        "ranks": sorted(entries, key=lambda entry: int(entry["rank"])),
        "notes": notes,
    }
    with new_trace(output, force):
        for rank, tables in tables_of_rank.items():
            write_rank(output, rank, tables)
        write_meta(output, meta)
    return open_trace(output)


def _shifts(traces: Sequence[Trace], align: str | None) -> list[int]:
    """Return what to add to the times of each trace, ns. Raise TraceError if the traces
    share no time."""
    spans = [trace.span_ns() for trace in traces]
    if align is not None:
        names = [str(trace.path) for trace in traces]
        if align != "start" and str(Path(align)) not in names:
            raise TraceError(f"--align {align}: name one of the traces, or start")
        reference = spans[0 if align == "start" else names.index(str(Path(align)))]
        return [reference[0] - span[0] if span and reference else 0 for span in spans]
    shifts = [_wall_offset(trace) - _wall_offset(traces[0]) for trace in traces]
    moved = zip(traces, spans, shifts, strict=True)
    refuse_gaps(
        [
            (*(ns + shift for ns in span), trace.path)
            for trace, span, shift in moved
            if span
        ],
        TraceError,
    )
    return shifts


def refuse_gaps(spans: Iterable[tuple[Any, ...]], error: type[UserError]) -> None:
    """Raise an error if one of several spans shares no time with the others.

    A span is (start ns, end ns, path).
    """
    first, *others = sorted(spans) or [(0, 0, None)]
    _, reached, last = first
    for start, end, path in others:
        if start > reached + _MAX_GAP_NS:
            raise error(
                f"{path} begins {ms_text((start - reached) / 1e6)} after {last} has "
                "ended: they share no time. If they "
                "are of one run on clocks that differ, pass --align start (all begin "
                "at once)"
            )
        if end > reached:
            reached, last = end, path


def _wall_offset(trace: Trace) -> int:
    offset = trace.meta.clock.wall_offset_ns
    if offset is None:
        raise TraceError(
            f"{trace.path} does not have its clock's offset from Unix time: it cannot "
            "be merged"
        )
    return offset


def _shifted(entry: dict[str, Any], shift: int) -> dict[str, Any]:
    shifted: dict[str, Any] = {
        key: entry[key] + shift
        for key in ("started_ns", "first_iteration_start_ns")
        if entry.get(key) is not None
    }
    if entry.get("transfers_spans_ns"):
        shifted["transfers_spans_ns"] = [
            [start + shift, end + shift] for start, end in entry["transfers_spans_ns"]
        ]
    if slices := entry.get("detailed_slices"):
        shifted["detailed_slices"] = [
            {
                **detailed,
                "span_ns": [time_ns + shift for time_ns in detailed["span_ns"]],
            }
            for detailed in slices
        ]
    return {**entry, **shifted}
