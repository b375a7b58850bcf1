"""The points in time of a rank's work and calls within a span, and what each depends
on."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.activity.busy_time import (
    all_work,
    main_kernels,
    main_transfers,
)
from ebbtide.analysis.metrics.critical_path.graph import GraphBuilder
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.profiler.trace import Trace

# A launch takes 5 to 50 us. What begins later, while nothing precedes it on its stream,
# waits for another stream.
_MAX_LAUNCH_NS = 50_000
# Order of nodes of the same time: an end comes before the start that follows it, but
# after its own start.
(
    _WORK_END,
    _CALL_END,
    _CALL_START,
    _EMPTY_CALL_END,
    _WORK_START,
    _JOIN,
    _EMPTY_WORK_END,
) = range(7)
UNKNOWN = -1


class Step(IntEnum):
    """Kind of an edge: the reason why a point in time is as late as it is."""

    WORK = 0  # Work on the device runs.
    CALL = 1  # A call runs on the host.
    HOST = 2  # The host does something else between two calls.
    LAUNCH = 3  # From a call to the start of the work that it launched.
    STREAM = 4  # From the end of work to the start of the next one on its stream.
    # From the end of work to the start of work on another stream that waited for it.
    OTHER_STREAM = 5
    # From the end of work to the end of the call that waited for it.
    SYNCHRONIZATION = 6
    # From the start of a collective to the time at which the last rank has begun it.
    RANK = 7
    START = 8  # Nothing is known that came before.


@dataclass(frozen=True)
class RankNodes:
    """Work and calls of a rank within a span, with the numbers of their nodes, in order
    of their starts."""

    rank: int
    # start_ns, end_ns, stream, launch_ns (UNKNOWN: not recorded), kind, name, row of
    # the table.
    work: pd.DataFrame
    # start_ns, end_ns, name, thread, stream, awaited_stream, awaited_ns, launches.
    calls: pd.DataFrame
    work_start: Ints
    work_join: Ints  # When all ranks have begun a collective; the start of other work.
    work_end: Ints
    call_start: Ints
    call_end: Ints
    shift_ns: int  # Added to the times of the rank.
    # Returns the part of the iteration at a time of the host.
    host_part: Callable[[int], str | None]
    device_part: Callable[[int], str | None]  # The same at a time of the device.


def add_rank(
    builder: GraphBuilder, trace: Trace, rank: int, shift_ns: int
) -> RankNodes:
    """Add the work and calls of a rank to a graph. `shift_ns` is added to its times."""
    span = builder.start_ns - shift_ns, builder.end_ns - shift_ns
    work, calls = _work(trace, rank, span), _calls(trace, rank, span)
    for rows in (work, calls):
        rows[["start_ns", "end_ns"]] += shift_ns
    work_start, work_end = _times(work)
    call_start, call_end = _times(calls)
    starts, call_starts = (
        builder.nodes(work_start, _WORK_START),
        builder.nodes(call_start, _CALL_START),
    )
    is_collective = work["kind"].eq("communication").to_numpy(bool)
    joins = starts.copy()
    joins[is_collective] = builder.nodes(work_start[is_collective], _JOIN)
    ends = builder.nodes(
        work_end, np.where(work_end > work_start, _WORK_END, _EMPTY_WORK_END)
    )
    call_ends = builder.nodes(
        call_end, np.where(call_end > call_start, _CALL_END, _EMPTY_CALL_END)
    )
    parts = (
        _part_finder(trace, rank, device_times=False),
        _part_finder(trace, rank, device_times=True),
    )
    nodes = RankNodes(
        rank, work, calls, starts, joins, ends, call_starts, call_ends, shift_ns, *parts
    )
    builder.edges(starts[is_collective], joins[is_collective], Step.RANK)
    builder.edges(joins, ends, Step.WORK)
    builder.edges(call_starts, call_ends, Step.CALL)
    _add_host_order(builder, nodes)
    _add_streams(builder, nodes)
    _add_waits(builder, nodes)
    return nodes


def _times(rows: pd.DataFrame) -> tuple[Ints, Ints]:
    return rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)


def _within(rows: pd.DataFrame, span: tuple[int, int]) -> pd.DataFrame:
    """Return the rows with time in a span, cut to it, in order of their starts."""
    rows = rows[(rows["end_ns"] > span[0]) & (rows["start_ns"] < span[1])]
    rows = rows.assign(
        start_ns=rows["start_ns"].clip(lower=span[0]),
        end_ns=rows["end_ns"].clip(upper=span[1]),
    )
    return rows.sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)


def _whole(column: pd.Series) -> Ints:
    values: Ints = column.fillna(UNKNOWN).to_numpy(np.int64)
    return values


def _work(trace: Trace, rank: int, span: tuple[int, int]) -> pd.DataFrame:
    kernels, copies = main_kernels(trace, rank), main_transfers(trace, rank)
    columns = ["start_ns", "end_ns", "stream", "launch_ns", "kind", "name", "row"]
    kernels = kernels.assign(
        row=np.arange(len(kernels)), kind=kernels["kind"].astype(object)
    )
    copies = copies.assign(row=UNKNOWN, kind="copy")
    parts = [
        _within(rows[columns].astype({"name": object}), span)
        for rows in (kernels, copies)
    ]
    work = pd.concat([part for part in parts if len(part)] or parts[:1])
    work = work.assign(
        stream=_whole(work["stream"]), launch_ns=_whole(work["launch_ns"])
    )
    return work.sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)


def _calls(trace: Trace, rank: int, span: tuple[int, int]) -> pd.DataFrame:
    """Return the calls in a span.

    Where only the times of launches are known, return these as calls without length.
    """
    calls = trace.calls(rank)
    work = all_work(trace, rank)
    launches = np.unique(work.launches[work.launched])
    calls = calls.assign(
        name=calls["name"].astype(object), launches=np.isin(calls["start_ns"], launches)
    )
    alone = np.setdiff1d(launches, calls["start_ns"].to_numpy(np.int64))
    alone = alone[(alone > span[0]) & (alone < span[1])]
    columns = [
        "start_ns",
        "end_ns",
        "name",
        "thread",
        "stream",
        "awaited_stream",
        "awaited_ns",
        "launches",
    ]
    inside = _within(calls[columns], span)
    if len(alone):
        points = pd.DataFrame(
            {"start_ns": alone, "end_ns": alone, "name": "launch", "launches": True}
        )
        inside = (
            pd.concat([inside, points])
            if len(inside)
            else points.reindex(columns=columns)
        )
    inside = inside.sort_values(
        ["start_ns", "end_ns"], kind="stable", ignore_index=True
    )
    for column in ("thread", "stream", "awaited_stream", "awaited_ns"):
        inside[column] = _whole(inside[column].astype("Int64"))
    return inside


def _part_finder(
    trace: Trace, rank: int, device_times: bool
) -> Callable[[int], str | None]:
    """Return a function from a time to its phase, or `other`; None outside of
    iterations."""
    parts = intervals(trace, rank, device_times).times_with_other
    rows = sorted(
        zip(parts.starts.tolist(), parts.ends.tolist(), parts.phases, strict=True)
    )
    starts = [row[0] for row in rows]

    def find(at_ns: int) -> str | None:
        index = bisect_right(starts, at_ns) - 1
        return rows[index][2] if index >= 0 and at_ns < rows[index][1] else None

    return find


def _add_host_order(builder: GraphBuilder, nodes: RankNodes) -> None:
    """Add the order of the calls of each thread. The first one of a thread in a phase
    follows the last call of any thread before it: the backward has a thread of its own,
    which begins when the forward has ended."""
    calls = nodes.calls
    own = calls.groupby("thread").cumcount().to_numpy() > 0
    previous = (
        pd.Series(np.arange(len(calls)))
        .groupby(calls["thread"])
        .shift(fill_value=UNKNOWN)
        .to_numpy(np.int64)
    )
    # A call may be within another one.
    builder.edges(nodes.call_start[previous[own]], nodes.call_start[own], Step.CALL)
    builder.edges(nodes.call_end[previous[own]], nodes.call_start[own], Step.HOST)
    starts, ends = _times(calls)
    by_end = np.argsort(ends, kind="stable")
    before = np.searchsorted(ends[by_end], starts) - 1
    phases = np.array(
        [nodes.host_part(start - nodes.shift_ns) for start in starts.tolist()], object
    )
    begins = ~own | (phases != phases[previous])
    handed = np.flatnonzero(begins & (before >= 0))
    builder.edges(
        nodes.call_end[by_end[before[handed]]], nodes.call_start[handed], Step.HOST
    )


def _add_streams(builder: GraphBuilder, nodes: RankNodes) -> None:
    """Add the order of work on each stream, launches, and waits between streams."""
    work, calls = nodes.work, nodes.calls
    starts, ends = _times(work)
    previous = (
        pd.Series(np.arange(len(work)))
        .groupby(work["stream"])
        .shift(fill_value=UNKNOWN)
        .to_numpy(np.int64)
    )
    own = previous >= 0
    builder.edges(nodes.work_end[previous[own]], nodes.work_start[own], Step.STREAM)
    launches = work["launch_ns"].to_numpy(np.int64)
    launched = np.where(launches == UNKNOWN, UNKNOWN, launches + nodes.shift_ns)
    call_starts = calls["start_ns"].to_numpy(np.int64)
    call = np.searchsorted(call_starts, launched)
    has_call = call < len(calls)
    has_call[has_call] = call_starts[call[has_call]] == launched[has_call]
    # Work may begin before the call that launches it has ended.
    builder.edges(
        nodes.call_start[call[has_call]], nodes.work_start[has_call], Step.LAUNCH
    )
    builder.edges(
        nodes.call_end[call[has_call]], nodes.work_start[has_call], Step.LAUNCH
    )
    blocking = has_call.copy()
    blocking[has_call] = ends[has_call] <= _times(calls)[1][call[has_call]]
    builder.edges(
        nodes.work_end[blocking], nodes.call_end[call[blocking]], Step.SYNCHRONIZATION
    )
    if (
        calls["name"].str.contains("StreamWaitEvent").any()
        and calls["awaited_stream"].ge(0).any()
    ):
        return
    ready = np.maximum(
        np.where(own, ends[previous], UNKNOWN), np.maximum(launched, builder.start_ns)
    )
    by_end = np.argsort(ends, kind="stable")
    before = np.searchsorted(ends[by_end], starts, side="right") - 1
    late = np.flatnonzero((starts - ready > _MAX_LAUNCH_NS) & (before >= 0))
    latest = by_end[before[late]]
    waits = (ends[latest] > ready[late]) & (latest != late)
    builder.edges(
        nodes.work_end[latest[waits]], nodes.work_start[late[waits]], Step.OTHER_STREAM
    )


def _add_waits(builder: GraphBuilder, nodes: RankNodes) -> None:
    """Add the waits of the host for the device, and recorded waits between streams."""
    work, calls = nodes.work, nodes.calls
    ends, streams = work["end_ns"].to_numpy(np.int64), work["stream"].to_numpy(np.int64)
    launches = work["launch_ns"].to_numpy(np.int64) + nodes.shift_ns
    is_wait = calls["name"].str.contains("Synchronize|StreamWaitEvent").to_numpy(bool)
    for number, call in zip(
        np.flatnonzero(is_wait).tolist(), calls[is_wait].itertuples(), strict=True
    ):
        recorded_ns = (
            call.awaited_ns + nodes.shift_ns
            if call.awaited_ns != UNKNOWN
            else call.start_ns
        )
        awaited = launches <= recorded_ns
        if call.awaited_stream >= 0:
            awaited &= streams == call.awaited_stream
        if "StreamWaitEvent" not in call.name:
            awaited &= (ends <= call.end_ns) & (ends > call.start_ns)
            source = _latest(awaited, ends)
            builder.edges(
                nodes.work_end[source],
                nodes.call_end[[number] * len(source)],
                Step.SYNCHRONIZATION,
            )
        elif call.stream >= 0 and call.awaited_stream >= 0:
            later = np.flatnonzero(
                (streams == call.stream) & (launches >= call.start_ns)
            )[:1]
            source = _latest(awaited, ends)[: len(later)]
            builder.edges(
                nodes.work_end[source],
                nodes.work_start[later[: len(source)]],
                Step.OTHER_STREAM,
            )


def _latest(selected: Ints, ends: Ints) -> Ints:
    """Return the position of the latest selected end; empty where there is none."""
    positions = np.flatnonzero(selected)
    return positions[[int(np.argmax(ends[positions]))]] if len(positions) else positions


def add_joins(builder: GraphBuilder, group: list[tuple[RankNodes, Ints]]) -> None:
    """Move the joins of common collectives to when the last rank has begun them.

    `group`: of each rank the rows of these collectives in its table of kernels.
    """
    places = []
    for nodes, rows in group:
        position = pd.Series(np.arange(len(nodes.work)), nodes.work["row"])
        places.append(
            position[position.index >= 0]
            .reindex(rows, fill_value=UNKNOWN)
            .to_numpy(np.int64)
        )
    present = np.all([place >= 0 for place in places], axis=0)
    chosen = [
        (nodes, place[present]) for (nodes, _), place in zip(group, places, strict=True)
    ]
    last = np.max([_times(nodes.work)[0][rows] for nodes, rows in chosen], axis=0)
    for nodes, rows in chosen:
        builder.move(
            nodes.work_join[rows], np.minimum(last, _times(nodes.work)[1][rows])
        )
        for other, other_rows in chosen:
            builder.edges(
                other.work_start[other_rows], nodes.work_join[rows], Step.RANK
            )
