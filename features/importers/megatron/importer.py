"""Imports logs of Megatron-LM: iterations, timers (`--timing-log-level`), and the
report of memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median

import numpy as np

from ebbtide.features.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.features.importers.logs.runs import (
    OneRank,
    RunReader,
    chosen_run,
    read_runs,
)
from ebbtide.features.importers.logs.settings import (
    JobSettings,
    add_peaks,
    add_ranks,
    monitored_ranks,
)
from ebbtide.features.importers.logs.text_log import (
    LogLine,
    clock_offset_ns,
    first_log_lines,
    only_log,
)
from ebbtide.features.importers.nvml_monitor.importer import FORMAT as MONITOR_FORMAT
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.phases import BACKWARD, FORWARD, UPDATE
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

# Timers and memory marks of DeepSpeed's steps, which say more than Megatron's lines in
# the same log. Jobs print memory at their start in the same form.
_DEEPSPEED = re.compile(
    r"time \(ms\) \|.{0,400}\| step(?:_microstep)?:|"
    r"\bEngine (?:before|after) (?:forward|backward|step)\b"
)
# Longer than any job: times that add up to more are damaged.
_MAX_NS = 1 << 60
# By version: `forward` and `backward` before 2.0.
_FORWARD, _BACKWARD = ("forward-compute", "forward"), ("backward-compute", "backward")
_BOTH, _UPDATE = "forward-backward", "optimizer"
# Parts of the optimizer's step, in the order in which it takes them.
_UPDATE_PARTS = (
    "optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad",
    "optimizer-count-zeros", "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
)  # fmt: skip
# With underscores in Megatron-DeepSpeed of Argonne. One decimal: a line that was cut
# within the number has no ` |`.
_ITERATION = re.compile(
    r"\biteration[= ]\s{0,20}(\d{1,12})/\s{0,20}(\d{1,12}) \|.{0,2000}?"
    r"\belapsed[ _]time[ _]per[ _]iteration(?: \(ms\): "
    r"|_ms=)\s{0,20}(\d{1,9}\.\d{1,6}) ?\|"
)
# Timers: mean per iteration since the line before. `--timing-log-option` is minmax, max
# or all.
_HEADER = re.compile(r"\btimes? across ranks \(ms\):")
_TIMER = re.compile(
    r"(?:^|\s)([a-z][\w/-]{0,63}) \.{0,64}: (?:\((?:\d{1,9}\.\d\d), "
    r"(\d{1,9}\.\d\d)\)|(\d{1,9}\.\d\d)(?!\S))"
)
_NAME = re.compile(r"(?:^|\s)([a-z][\w/-]{0,63}):\s*$")
_RANK = re.compile(r"(?:^|\s)rank\s{1,8}(\d{1,7}): (\d{1,9}\.\d\d)(?!\S)")
# Timers of old versions, on one line: `time (ms) | forward: 12.34 | backward: 23.45`.
_OLD_HEADER = "time (ms) |"
_OLD_TIMER = re.compile(r"\|\s([a-z][\w -]{0,63}): (\d{1,9}\.\d\d)(?!\d)")
_LOG_INTERVAL = re.compile(r"\blog_interval \.{3,64} (\d{1,7})\b")
# A line with a gap of more is of another run, which was appended.
_MAX_INTERVAL = 100_000


class MegatronLogImporter:
    """Importer of Megatron-LM logs."""

    format = "megatron-log"
    recognition = Recognition.LOG_LINES
    stage = Stage.JOB

    def matches(self, source: Source) -> bool:
        has_iterations = False
        for text in first_log_lines(source):
            if _DEEPSPEED.search(text):
                return False
            has_iterations = has_iterations or (
                "iteration" in text and _ITERATION.search(text) is not None
            )
        return has_iterations

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        source = only_log(sources, "Megatron")
        run = chosen_run(
            source, read_runs(source, MegatronRun, options.run), options.run, builder
        )
        reader, zone, settings = run.intervals, run.zone, run.settings
        reader.finish()
        if not reader.intervals:
            raise SourceError(
                f"{source} has no line `iteration N/ M | ... | elapsed time per "
                "iteration (ms): ...`"
            )
        placed = place_iterations(reader.intervals)
        first_ns, last_ns = int(placed[0].starts_ns[0]), int(placed[-1].ends_ns[-1])
        if last_ns - first_ns > _MAX_NS:
            raise source.damaged("its times add up to decades")
        dated = any(interval.t_ns is not None for interval in reader.intervals)
        monitors = options.sources.get(MONITOR_FORMAT, ())
        offset_ns = clock_offset_ns(builder, zone) if dated else 0
        ranks = _add_job(builder, settings, monitors)
        timed = {
            rank
            for interval in reader.intervals
            for times in interval.timers.values()
            for rank in times
        }
        timed_ranks = {rank for rank in timed if rank is not None}
        shortened = False
        for rank in sorted(
            {0, *monitored_ranks(ranks, monitors), *settings.reports, *timed_ranks}
            & ranks.keys()
        ):
            shortened |= add_iterations(ranks[rank], rank, placed, offset_ns)
        add_peaks(ranks, settings.reports, first_ns - offset_ns)
        for entry in ranks.values():
            entry.meta["first_iteration_start_ns"] = first_ns - offset_ns
        for note in _notes(reader, settings, dated, shortened):
            builder.note(note)
        return [] if dated else [source]


def _add_job(
    builder: TraceBuilder, settings: JobSettings, monitors: Sequence[Source]
) -> dict[int, RankBuilder]:
    ranks = add_ranks(builder, settings, monitors)
    total = settings.params()
    for entry in ranks.values():
        # The log does not say how optimizer state is divided between several ranks.
        entry.meta["model"] = {
            "total_params": total,
            "params": total if len(ranks) == 1 else None,
        }
        entry.meta.update({"torch": settings.torch, "cuda": settings.cuda})
    return ranks


def _notes(
    log: IntervalReader, settings: JobSettings, dated: bool, shortened: bool
) -> Iterator[str]:
    """Yield a note for each part that the log does not have, or has with limits."""
    timers = {name for interval in log.intervals for name in interval.timers}
    yield from _notes_on_phases(log, timers)
    if not dated:
        yield (
            "the log has no times of day: iterations are placed one after another, and "
            "gaps are not known"
        )
    if (per_line := max(interval.count for interval in log.intervals)) > 1:
        yield (
            f"the log has a line per {per_line} iterations: each of them gets their "
            "mean (--log-interval 1 has all)"
        )
    if (first := log.intervals[0].last_iteration - log.intervals[0].count) > 0:
        yield f"iteration 0 of the trace is iteration {first + 1} of the log"
    if timers and (settings.world_size or 1) > 1:
        yield "timers are those of the slowest rank, unless the log has them by rank"
    if timers & {"forward-compute"}:
        yield "the forwards of all micro-batches are placed before their backwards"
    if log.repeated:
        yield f"lines of iterations that the log has twice are left out: {log.repeated}"
    if log.incomplete:
        yield (
            "the log ends within the timers of its last iterations, which are left out"
        )
    if shortened:
        yield (
            "timers that add up to more than their iteration are shortened in "
            "proportion"
        )
    yield (
        "memory of Megatron's report is the peak since the job's start: it stands "
        "for all iterations"
        if settings.reports
        else "the log has no report of memory"
    )


def _notes_on_phases(log: IntervalReader, timers: set[str]) -> Iterator[str]:
    """Yield a note where the log has no timers of phases, or of too few."""
    iteration_ms = median(interval.iteration_ms for interval in log.intervals)
    if not timers & {"optimizer", "forward-compute", "forward"}:
        yield (
            f"the log has no timers of phases: its iterations take {iteration_ms:.1f} "
            "ms (median). For phases run with "
            "--timing-log-level 2"
        )
    elif not timers & {"forward-compute", "forward"}:
        yield (
            "the log does not tell forward from backward: both count as `other` "
            "(--timing-log-level 2 has them)"
        )


@dataclass(frozen=True)
class PlacedIterations:
    """The iterations of one interval in time.

    `first` is the number of the first of them in the trace, from 0.
    """

    interval: LoggedInterval
    first: int
    starts_ns: np.ndarray
    ends_ns: np.ndarray


def place_iterations(intervals: Sequence[LoggedInterval]) -> list[PlacedIterations]:
    """Place iterations on the log's clock, or from 0 if it has no times. An interval,
    of equally long iterations, ends at the time of its line, or later if they took
    longer: times in full seconds are up to a second early."""
    placed: list[PlacedIterations] = []
    firsts = accumulate((interval.count for interval in intervals), initial=0)
    end_ns: int | None = None
    for interval, first in zip(intervals, firsts, strict=False):
        length_ns = round(interval.iteration_ms * 1e6)
        total_ns = interval.count * length_ns
        earliest = [] if end_ns is None else [end_ns + total_ns]
        own = [] if interval.t_ns is None else [interval.t_ns]
        end_ns = max(earliest + own, default=total_ns)
        ends = end_ns - length_ns * np.arange(
            interval.count - 1, -1, -1, dtype=np.int64
        )
        placed.append(PlacedIterations(interval, first, ends - length_ns, ends))
    return placed


def add_iterations(
    entry: RankBuilder, rank: int, placed: Sequence[PlacedIterations], offset_ns: int
) -> bool:
    """Add the iterations to a rank: marks, phases one after the other up to the end,
    and parts of the update as ops.

    `offset_ns`: of the log's clock from UTC. Return whether timers that add up to more
    than the iteration were shortened."""
    shortened = False
    for iterations in placed:
        interval, ends = iterations.interval, iterations.ends_ns - offset_ns
        numbers = iterations.first + np.arange(interval.count)
        entry.extend(
            "iteration_marks",
            iteration=numbers,
            start_ns=iterations.starts_ns - offset_ns,
            end_ns=ends,
        )
        forward, backward = (
            interval.timer_ms(rank, *_FORWARD),
            interval.timer_ms(rank, *_BACKWARD),
        )
        both, update = interval.timer_ms(rank, _BOTH), interval.timer_ms(rank, _UPDATE)
        split = forward is not None and backward is not None
        computed = max(
            both or 0.0, (forward or 0.0) + (backward or 0.0) if split else 0.0
        )
        total = computed + (update or 0.0)
        scale = min(1.0, interval.iteration_ms / total) if total else 1.0
        shortened |= scale < 1
        logged_ms = {FORWARD: forward, BACKWARD: backward, UPDATE: update}
        lengths = {
            phase: round(ms * scale * 1e6)
            for phase, ms in logged_ms.items()
            if ms is not None
        }
        update_starts = ends - lengths.get(UPDATE, 0)
        starts = update_starts - round(computed * scale * 1e6)
        if not split and both is not None:
            _add_op(entry, _BOTH, starts, update_starts, numbers)
        for phase in (FORWARD, BACKWARD) if split else ():
            _add_phase(entry, phase, starts, starts + lengths[phase], numbers)
            starts = starts + lengths[phase]
        if update is not None:
            _add_phase(entry, UPDATE, update_starts, ends, numbers)
            for name in _UPDATE_PARTS:
                part = interval.timer_ms(rank, name)
                if part is not None:
                    part_ends = np.minimum(
                        update_starts + round(part * scale * 1e6), ends
                    )
                    _add_op(entry, name, update_starts, part_ends, numbers)
                    update_starts = part_ends
    return shortened


def _add_phase(
    entry: RankBuilder,
    phase: str,
    starts: np.ndarray,
    ends: np.ndarray,
    numbers: np.ndarray,
) -> None:
    entry.extend(
        "phases",
        phase=phase,
        iteration=numbers,
        micro_step=0,
        start_ns=starts,
        end_ns=ends,
    )


def _add_op(
    entry: RankBuilder,
    name: str,
    starts: np.ndarray,
    ends: np.ndarray,
    numbers: np.ndarray,
) -> None:
    entry.extend(
        "ops",
        start_ns=starts,
        end_ns=ends,
        resource="host",
        name=name,
        iteration=numbers,
    )


@dataclass
class LoggedInterval:
    """The iterations since the line before, for which the log has means."""

    last_iteration: int  # Number of the last of them, from 1
    iteration_ms: float
    # Time of the line as if the log's clock were UTC; None if the line has no time
    t_ns: int | None
    # Mean ms per iteration, by name and rank. The rank is None for the maximum over
    # ranks.
    timers: dict[str, dict[int | None, float]] = field(default_factory=dict)
    count: int = 1

    def timer_ms(self, rank: int, *names: str) -> float | None:
        """Return the first of some timers that the log has, of a rank or the maximum
        over ranks; None for none."""
        for name in names:
            of_ranks = self.timers.get(name)
            if of_ranks:
                return of_ranks.get(rank, of_ranks.get(None))
        return None


class MegatronRun(RunReader):
    """Reads one run of a log of Megatron-LM."""

    def __init__(self, settings: JobSettings | None = None) -> None:
        super().__init__(settings)
        self.intervals = IntervalReader()
        self._ranks = OneRank()

    def feed(self, line: LogLine) -> None:
        super().feed(line)
        if self._ranks.has(line):
            self.intervals.feed(line)

    @property
    def iterations(self) -> int:
        return len(self.intervals.intervals)

    @property
    def is_complete(self) -> bool:  # type: ignore[override]
        last = self.intervals.intervals[-1:]
        return bool(last) and last[0].last_iteration >= self.intervals.total

    def restarts(self, line: LogLine) -> bool:
        match = _ITERATION.search(line.text) if "iteration" in line.text else None
        last = self.intervals.intervals[-1].last_iteration
        return match is not None and int(match[1]) < last and self._ranks.has(line)


class IntervalReader:
    """Collects `intervals` line by line, without their `count`."""

    def __init__(self) -> None:
        self.intervals: list[LoggedInterval] = []
        self.total = 0  # The number of the last iteration that the job shall reach.
        self.repeated = 0  # Lines of an iteration that the log has had, left out.
        # Whether the log ended within the timers of its last interval.
        self.incomplete = False
        self._log_interval: int | None = None
        self._in_timers = False
        self._name = ""

    def feed(self, line: LogLine) -> None:
        text = line.text
        if "iteration" in text and (match := _ITERATION.search(text)):
            number, total, ms = match.groups()
            self.total, self._in_timers = int(total), False
            if self.intervals and int(number) == self.intervals[-1].last_iteration:
                self.repeated += 1
                return
            self.intervals.append(LoggedInterval(int(number), float(ms), line.t_ns))
        elif "across ranks (ms)" in text and (header := _HEADER.search(text)):
            self._in_timers, self._name = True, ""
            self._add_timers(text[header.end() :])
        elif _OLD_HEADER in text and self.intervals:
            for name, ms in _OLD_TIMER.findall(text):
                self.intervals[-1].timers.setdefault(name, {})[None] = float(ms)
        elif self._in_timers:
            self._add_timers(text)
        elif (
            self._log_interval is None
            and "log_interval" in text
            and (match := _LOG_INTERVAL.search(text))
        ):
            self._log_interval = int(match.group(1))

    def _add_timers(self, text: str) -> None:
        """Read a line below the header of the timers."""
        if not self.intervals:
            return
        timers = self.intervals[-1].timers
        if match := _TIMER.search(text):
            name, of_slowest, only = match.groups()
            timers.setdefault(name, {}).setdefault(None, float(of_slowest or only))
        elif (match := _RANK.search(text)) and self._name:
            timers.setdefault(self._name, {}).setdefault(
                int(match.group(1)), float(match.group(2))
            )
        elif match := _NAME.search(text):
            self._name = match.group(1)
        elif text.strip():
            self._in_timers = False

    def finish(self) -> None:
        """Derive how many iterations each interval has.

        The last one is left out if it lacks timers.
        """
        self.incomplete = (
            len(self.intervals) > 1
            and self.intervals[-1].timers.keys() < self.intervals[-2].timers.keys()
        )
        if self.incomplete:
            self.intervals.pop()
        differences = [
            after.last_iteration - before.last_iteration
            for before, after in pairwise(self.intervals)
        ]
        differences = [d if 0 < d <= _MAX_INTERVAL else 0 for d in differences]
        usual = Counter(d for d in differences if d).most_common(1)
        interval = usual[0][0] if usual else min(self._log_interval or 1, _MAX_INTERVAL)
        for logged, difference in zip(self.intervals, [0, *differences], strict=False):
            # The first line, also of a run that was appended, covers a whole interval,
            # or all iterations so far.
            logged.count = max(1, min(interval, difference or logged.last_iteration))
