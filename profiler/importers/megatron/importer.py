"""Imports logs of Megatron-LM: iterations, timers (`--timing-log-level`), and the report of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median

from ebbtide.profiler.importers.deepspeed.clock import clock_offset_ns
from ebbtide.profiler.importers.deepspeed.memory_report import MemoryReport, add_report, read_reports
from ebbtide.profiler.importers.deepspeed.metadata import add_ranks, monitored_ranks
from ebbtide.profiler.importers.deepspeed.settings import JobSettings, SettingsReader
from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.megatron.interval_reader import IntervalReader, LoggedInterval, is_iteration
from ebbtide.profiler.importers.megatron.rows import add_iterations, place_iterations
from ebbtide.profiler.importers.nvml_monitor.importer import FORMAT as MONITOR_FORMAT
from ebbtide.profiler.importers.nvml_monitor.monitor import read_coverage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.text_log import LogLine, read_lines, zone_ns
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

# Timers and memory marks of DeepSpeed, which say more than Megatron's lines in the same log.
_DEEPSPEED = re.compile(r"time \(ms\) \|.{0,400}\| step(?:_microstep)?:|\bMax_MA \d")
# Number of lines that are searched for Megatron's lines.
_MAX_SEARCHED_LINES = 100_000
# Longer than any job: times that add up to more are damaged.
_MAX_NS = 1 << 60


class MegatronLogImporter:
    """Importer of Megatron-LM logs."""

    format = "megatron-log"
    recognition = Recognition.LOG_LINES
    stage = Stage.JOB

    def matches(self, source: Source) -> bool:
        if b"\0" in source.head:
            return False
        has_iterations = False
        for line, _ in zip(read_lines(source), range(_MAX_SEARCHED_LINES), strict=False):
            if _DEEPSPEED.search(line.text):
                return False
            has_iterations = has_iterations or is_iteration(line.text)
        return has_iterations

    def import_into(self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions) -> list[Source]:
        if len(sources) > 1:
            raise SourceError(
                "two Megatron logs cannot make one trace: import each of them alone, then `ebbtide merge` the traces"
            )
        (source,) = sources
        log = _Log(source)
        if not log.intervals:
            raise SourceError(f"{source} has no line `iteration N/ M | ... | elapsed time per iteration (ms): ...`")
        placed = place_iterations(log.intervals)
        first_ns, last_ns = int(placed[0].starts_ns[0]), int(placed[-1].ends_ns[-1])
        if last_ns - first_ns > _MAX_NS:
            raise source.damaged("its times add up to decades")
        dated = any(interval.t_ns is not None for interval in log.intervals)
        monitors = read_coverage(options.sources.get(MONITOR_FORMAT, ()))
        offset_ns = clock_offset_ns(source, builder, log.zone, (first_ns, last_ns), monitors) if dated else 0
        ranks = _add_job(builder, log.settings)
        timed = {rank for interval in log.intervals for times in interval.timers.values() for rank in times}
        timed_ranks = {rank for rank in timed if rank is not None}
        shortened = False
        for rank in sorted({0, *monitored_ranks(ranks, monitors), *log.reports, *timed_ranks} & ranks.keys()):
            shortened |= add_iterations(ranks[rank], rank, placed, offset_ns)
        for report in log.reports.values():
            if report.rank in ranks:
                add_report(ranks[report.rank], report, first_ns - offset_ns)
        for entry in ranks.values():
            entry.meta["first_iteration_start_ns"] = first_ns - offset_ns
        for note in _notes(log, dated, shortened, len(ranks)):
            builder.note(note)
        return [] if dated else [source]


class _Log:
    """The contents of a log.

    Attributes:
        intervals: The iterations.
        reports: The last report of memory of each rank.
        settings: Settings of the job.
        zone: Offset of the log's clock from UTC in ns; None if the log does not state it.
        incomplete: Whether the log ends within the timers of its last iterations.
    """

    def __init__(self, source: Source) -> None:
        reader, settings_reader = IntervalReader(), SettingsReader()
        self.reports: dict[int, MemoryReport] = {}

        def feed_readers() -> Iterator[LogLine]:
            for line in read_lines(source):
                reader.feed(line)
                settings_reader.feed(line)
                self.reports.update((report.rank, report) for report in read_reports(line.text))
                yield line

        lines = feed_readers()
        self.zone = zone_ns(lines)
        # `zone_ns` stops at the first line with a zone; the readers need all lines.
        for _ in lines:
            pass
        self.incomplete = reader.finish()
        self.intervals: list[LoggedInterval] = reader.intervals
        self.settings: JobSettings = settings_reader.settings


def _add_job(builder: TraceBuilder, settings: JobSettings) -> dict[int, RankBuilder]:
    """Add the ranks with their settings, and return their builders by rank."""
    ranks = add_ranks(builder, settings)
    total = settings.params()
    for entry in ranks.values():
        # The log does not say how optimizer state is divided between several ranks.
        entry.meta["model"] = {"total_params": total, "params": total if len(ranks) == 1 else None}
        entry.meta.update({"torch": settings.torch, "cuda": settings.cuda})
    return ranks


def _notes(log: _Log, dated: bool, shortened: bool, rank_count: int) -> Iterator[str]:
    """Yield a note for each part that the log does not have, or has with limits."""
    timers = {name for interval in log.intervals for name in interval.timers}
    iteration_ms = median(interval.iteration_ms for interval in log.intervals)
    if not timers & {"optimizer", "forward-compute", "forward"}:
        yield (
            f"the log has no timers of phases: its iterations take {iteration_ms:.1f} ms (median). For phases run with "
            "--timing-log-level 2"
        )
    elif not timers & {"forward-compute", "forward"}:
        yield "the log does not tell forward from backward: both count as `other` (--timing-log-level 2 has them)"
    if not dated:
        yield "the log has no times of day: iterations are placed one after another, and gaps are not known"
    if (per_line := max(interval.count for interval in log.intervals)) > 1:
        yield f"the log has a line per {per_line} iterations: each of them gets their mean (--log-interval 1 has all)"
    if (first := log.intervals[0].last_iteration - log.intervals[0].count) > 0:
        yield f"iteration 0 of the trace is iteration {first + 1} of the log"
    if timers and rank_count > 1:
        yield "timers are those of the slowest rank, unless the log has them by rank"
    if timers & {"forward-compute"}:
        yield "the forwards of all micro-batches are placed before their backwards"
    if log.incomplete:
        yield "the log ends within the timers of its last iterations, which are left out"
    if shortened:
        yield "timers that add up to more than their iteration are shortened in proportion"
    if log.reports:
        yield "memory of Megatron's report is the peak since the job's start: it stands for all iterations"
    else:
        yield "the log has no report of memory"
    if log.settings.world_size is None:
        yield "the log does not state the number of ranks: 1 is assumed"
