"""Imports logs of DeepSpeed training: timers (`wall_clock_breakdown`), memory marks, configuration, ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ebbtide.phases import FORWARD
from ebbtide.profiler.importers.deepspeed.clock import clock_offset_ns
from ebbtide.profiler.importers.deepspeed.durations import TimerReader
from ebbtide.profiler.importers.deepspeed.log_data import MarkedPhase, MemoryMark
from ebbtide.profiler.importers.deepspeed.memory_report import add_report
from ebbtide.profiler.importers.deepspeed.metadata import add_metadata, monitored_ranks
from ebbtide.profiler.importers.deepspeed.phases import TimedPhase, has_times, time_phases
from ebbtide.profiler.importers.deepspeed.rows import add_memory, add_phases
from ebbtide.profiler.importers.deepspeed.settings import JobSettings, SettingsReader
from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.nvml_monitor.importer import FORMAT as MONITOR_FORMAT
from ebbtide.profiler.importers.nvml_monitor.monitor import Coverage, read_coverage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.text_log import LogLine, read_lines, zone_ns
from ebbtide.profiler.trace import TraceBuilder

_SIGNATURES = re.compile(r"time \(ms\) \||\bMax_MA \d|see_memory_usage|[Dd]eep[Ss]peed|DEEPSPEED")
# Number of lines that are searched for the signatures.
_MAX_SEARCHED_LINES = 100_000
# Longer than any job: timers that add up to more are damaged.
_MAX_NS = 1 << 60


class DeepSpeedLogImporter:
    """Importer of DeepSpeed logs."""

    format = "deepspeed-log"
    recognition = Recognition.WORDS
    stage = Stage.JOB

    def matches(self, source: Source) -> bool:
        if b"\0" in source.head:
            return False
        lines = (line for line, _ in zip(read_lines(source), range(_MAX_SEARCHED_LINES), strict=False))
        return any(_SIGNATURES.search(line.text) for line in lines)

    def import_into(self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions) -> list[Source]:
        if len(sources) > 1:
            raise SourceError(
                "two DeepSpeed logs cannot make one trace: import each of them alone, then `ebbtide merge` the traces"
            )
        (source,) = sources
        dated = read_log(source, builder, read_coverage(options.sources.get(MONITOR_FORMAT, ())))
        return [] if dated else [source]


def read_log(source: Source, builder: TraceBuilder, monitors: Coverage | None) -> bool:
    """Add the contents of a log to a trace.

    Args:
        source: The log.
        builder: The trace.
        monitors: What monitor files of the same run cover. They give the time zone of the log's clock if the log does
            not state it.

    Returns:
        Whether the log has times of day.

    Raises:
        SourceError: The log has neither timers nor memory marks, or does not overlap with the monitor files.
    """
    timers, settings_reader = TimerReader(), SettingsReader()

    def feed_readers() -> Iterator[LogLine]:
        for line in read_lines(source):
            timers.feed(line)
            settings_reader.feed(line)
            yield line

    lines = feed_readers()
    zone = zone_ns(lines)
    # `zone_ns` stops at the first line with a zone; the readers need all lines.
    for _ in lines:
        pass
    whole_steps = bool(timers.steps)
    timers.finish(settings_reader.settings.accumulation())
    if timers.steps and not whole_steps:
        builder.note(
            "the log has no timers of whole steps: iterations are made of its micro-steps"
            + ("" if timers.timed_micro_steps else ", whose times are those of the memory marks")
        )
    phases = list(time_phases(timers.steps))
    timed = has_times(timers.steps, timers.marks)
    if not phases and not timed:
        raise SourceError(
            f"{source} has neither timers of a step nor memory marks with times: turn on wall_clock_breakdown (and "
            "memory_breakdown) in the DeepSpeed configuration"
        )
    if phases and phases[-1].end_ns - phases[0].start_ns > _MAX_NS:
        raise source.damaged("its timers add up to decades")
    for note in _missing_parts(timers, settings_reader.settings, timed):
        builder.note(note)
    offset_ns = clock_offset_ns(source, builder, zone, _span_ns(phases, timers.marks), monitors) if timed else 0
    ranks = add_metadata(builder, settings_reader.settings, timers.marks)
    phase_ranks = sorted({0, *monitored_ranks(ranks, monitors)})
    for rank in phase_ranks:
        add_phases(ranks[rank], phases, timers.steps, offset_ns)
    if len(ranks) > 1 and phases:
        others = ": the other ranks, which wait for it, get the same phases" if len(phase_ranks) > 1 else ""
        builder.note(f"the log has timers of rank 0 only{others}")
    skipped = add_memory(ranks[0], timers.marks, phases, timed, offset_ns)
    if phases and timers.reports and not timers.marks:
        builder.note("memory of Megatron's report is the peak since the job's start: it stands for all iterations")
        for report in timers.reports.values():
            if report.rank in ranks:
                add_report(ranks[report.rank], report, phases[0].start_ns - offset_ns)
    if skipped:
        builder.note(f"memory marks without a time or a phase are left out: {skipped}")
    if phases:
        first, mark = phases[0].start_ns, timers.steps[0].micro_steps[0].marked_ns.get(MarkedPhase(FORWARD, True))
        start = first if mark is None else min(first, mark)
        for entry in ranks.values():
            entry.meta["first_iteration_start_ns"] = start - offset_ns
    return timed


def _span_ns(phases: list[TimedPhase], marks: list[MemoryMark]) -> tuple[int, int]:
    times = [mark.t_ns for mark in marks if mark.t_ns is not None]
    return min(times + [p.start_ns for p in phases[:1]]), max(times + [p.end_ns for p in phases[-1:]])


def _missing_parts(timers: TimerReader, settings: JobSettings, timed: bool) -> Iterator[str]:
    """Yield a note for each part that the log does not have, or has with limits."""
    if not timers.steps:
        yield "the log has no timers of whole steps, so no phases: turn on wall_clock_breakdown"
    elif not timed:
        yield "the log has no times of day: phases are placed one after another, and gaps are not known"
    if not timers.marks:
        if not timers.reports:
            yield "the log has no memory marks: turn on memory_breakdown"
    else:
        yield (
            "allocated and reserved memory between two marks of the log is the peak between them, reserved in whole GiB"
        )
    if settings.config is None:
        damaged = "a damaged" if settings.config_damaged else "no"
        yield f"the log has {damaged} DeepSpeed configuration (json = ...): ratio, stride and offload are not known"
    if settings.params() is None and not settings.subgroups:
        yield "the log does not state the number of parameters"
    if settings.world_size is None:
        yield "the log does not state the number of ranks: 1 is assumed"
