"""Logs of DeepSpeed training: timers (`wall_clock_breakdown`), memory marks, configuration, ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ebbtide.profiler.importers.deepspeed.clock import ahead_ns
from ebbtide.profiler.importers.deepspeed.durations import Mark, Step, TimesReader
from ebbtide.profiler.importers.deepspeed.metadata import add_meta
from ebbtide.profiler.importers.deepspeed.phases import Placed, dated, place, time_of
from ebbtide.profiler.importers.deepspeed.settings import Facts, FactsReader
from ebbtide.profiler.importers.nvml_monitor.importer import Coverage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.text_log import Line, read_lines, zone_ns
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

FORMAT = "deepspeed-log"
_SIGNS = re.compile(r"time \(ms\) \||\bMax_MA \d|see_memory_usage|[Dd]eep[Ss]peed|DEEPSPEED")
# How far into a file its timers may begin, to be recognised by them.
_LOOK_LINES = 100_000
# Longer than any job: timers that add up to more are damaged.
_MOST_NS = 1 << 60


def matches(source: Source) -> bool:
    if b"\0" in source.head:
        return False
    lines = (line for line, _ in zip(read_lines(source), range(_LOOK_LINES), strict=False))
    return any(_SIGNS.search(line.text) for line in lines)


def read(source: Source, builder: TraceBuilder, beside: Coverage | None) -> bool:
    """Add what a log tells, and return whether it tells times of day. beside: the monitor files of the same run, which
    tell the zone of the log's clock where the log does not.

    Raises SourceError for a log without timers and memory marks, and one that does not meet the monitor files.
    """
    times, facts = TimesReader(), FactsReader()

    def seen() -> Iterator[Line]:
        for line in read_lines(source):
            times.feed(line)
            facts.feed(line)
            yield line

    lines = seen()
    zone = zone_ns(lines)
    for _ in lines:
        pass
    placed = list(place(times.steps))
    known = dated(times.steps, times.marks)
    if not placed and not known:
        raise SourceError(
            f"{source} has neither timers of a whole step nor memory marks with times: turn on wall_clock_breakdown "
            "(and memory_breakdown) in the DeepSpeed configuration"
        )
    if placed and placed[-1].end_ns - placed[0].start_ns > _MOST_NS:
        raise source.damaged("its timers add up to decades")
    for note in _missing(times, facts.facts, known):
        builder.note(note)
    shift = ahead_ns(source, builder, zone, _span(placed, times.marks), beside) if known else 0
    ranks = add_meta(builder, facts.facts, times.marks)
    timed = _timed(ranks, beside)
    for rank in timed:
        _phases(ranks[rank], placed, times.steps, shift)
    if len(ranks) > 1 and placed:
        others = ": the other ranks, which wait for it, carry the same phases" if len(timed) > 1 else ""
        builder.note(f"the log times rank 0 alone{others}")
    left_out = _memory(ranks[0], times.marks, placed, known, shift)
    if left_out:
        builder.note(f"memory marks that have no time and stand at no phase are left out: {left_out}")
    if placed:
        first, mark = placed[0].start_ns, times.steps[0].micro_steps[0].marked_ns.get(("forward", True))
        start = first if mark is None else min(first, mark)
        for entry in ranks.values():
            entry.meta["first_iteration_start_ns"] = start - shift
    return known


def _span(placed: list[Placed], marks: list[Mark]) -> tuple[int, int]:
    times = [mark.t_ns for mark in marks if mark.t_ns is not None]
    return min(times + [p.start_ns for p in placed[:1]]), max(times + [p.end_ns for p in placed[-1:]])


def _missing(times: TimesReader, facts: Facts, known: bool) -> Iterator[str]:
    if not times.steps:
        yield "the log has no timers of whole steps, so no phases: turn on wall_clock_breakdown"
    elif not known:
        yield "the log has no times of day: its phases stand one after another, and what was between is not known"
    if not times.marks:
        yield "the log has no memory marks: turn on memory_breakdown"
    else:
        yield (
            "the log marks allocated and reserved with the peak between marks (of reserved to the GiB), which is taken "
            "for all that time"
        )
    if facts.config is None:
        damaged = "a damaged" if facts.config_damaged else "no"
        yield f"the log has {damaged} DeepSpeed configuration (json = ...): ratio, stride and offload are not known"
    if facts.params() is None and not facts.subgroups:
        yield "the log does not tell the number of parameters"
    if facts.world_size is None:
        yield "the log does not tell the number of ranks: taken as 1"


def _timed(ranks: dict[int, RankBuilder], beside: Coverage | None) -> list[int]:
    """The ranks to which the phases go: the first, and of the others those whose device the monitor files tell of."""
    owners: dict[str, int] = {}
    for rank, entry in ranks.items():
        owners.setdefault(entry.meta["devices"][0]["device"], rank)
    watched = [f"cuda:{number}" for number in beside.devices] if beside is not None else []
    return sorted({0, *(owners[device] for device in watched if device in owners)})


def _phases(entry: RankBuilder, placed: list[Placed], steps: list[Step], shift: int) -> None:
    spans: dict[tuple[int, str], tuple[int, int]] = {}
    for p in placed:
        start, end = p.start_ns - shift, p.end_ns - shift
        spans[p.iteration, p.phase] = start, end
        entry.phase(p.phase, start, end, p.iteration, p.micro_step)
    for iteration, step in enumerate(steps):
        begin, _ = spans[iteration, "backward"]
        for name, ms in step.backward.items() if len(step.micro_steps) == 1 else ():
            end = begin + round(ms * 1e6)
            _op(entry, name, begin, end, iteration)
            begin = end
        # The timers of an update are printed when it is over; the all-gather is the last of it, wherever it stands.
        _, end = spans[iteration, "update"]
        parts = sorted(step.parts, key=lambda part: part[0] == "optimizer_allgather")
        for name, ms, t_ns in reversed(parts):
            end = end if t_ns is None else min(end, t_ns - shift)
            _op(entry, name, end - round(ms * 1e6), end, iteration)
            end -= round(ms * 1e6)


def _op(entry: RankBuilder, name: str, start: int, end: int, iteration: int) -> None:
    entry.add("ops", start_ns=start, end_ns=end, resource="host", name=name, iteration=iteration)


def _memory(entry: RankBuilder, marks: list[Mark], placed: list[Placed], known: bool, shift: int) -> int:
    """Draw the marks; returns how many have no place in time. known: whether the log tells times at all."""
    device = entry.meta["devices"][0]["device"]
    phases = {(p.iteration, p.micro_step, p.phase): p for p in placed}
    before: tuple[int, Mark] | None = None
    most_allocated = most_reserved = left_out = 0
    for mark in marks:
        # Each mark starts the peaks anew; those of a mark that has no place go to the next one.
        most_allocated = max(most_allocated, mark.most_allocated)
        most_reserved = max(most_reserved, mark.most_reserved, mark.reserved)
        t_ns = mark.t_ns if known and mark.t_ns is not None else time_of(mark.point, phases)
        if t_ns is None:
            left_out += 1
            continue
        if before is not None and t_ns > before[0]:
            # Between two marks only the most is known; it is drawn over the whole time, so that nothing is called free
            # that may not have been.
            entry.memory(before[0] - shift + 1, most_allocated, "allocated", device)
            entry.memory(before[0] - shift + 1, max(most_reserved, before[1].reserved), "reserved", device)
        entry.memory(t_ns - shift, mark.allocated, "allocated", device)
        entry.memory(t_ns - shift, mark.reserved, "reserved", device)
        if mark.host is not None:
            entry.memory(t_ns - shift, mark.host[0], "host", "cpu")
        before, most_allocated, most_reserved = (t_ns, mark), 0, 0
    return left_out
