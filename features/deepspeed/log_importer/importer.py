"""Imports logs of DeepSpeed training: timers (`wall_clock_breakdown`), memory marks,
configuration, and ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.features.deepspeed.log_importer.durations import (
    HostMemoryMark,
    MemoryMark,
    PhaseBoundary,
    StepTimers,
    TimerReader,
    UpdatePart,
)
from ebbtide.features.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.features.importers.logs.runs import (
    OneRank,
    RunChoice,
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

_SIGNATURES = re.compile(
    r"time \(ms\) \||\bMax_MA \d|see_memory_usage|[Dd]eep[Ss]peed|DEEPSPEED"
)
# The number of a step in the lines that DeepSpeed prints every `steps_per_print`.
_STEP = re.compile(r"\b(?:global_step=|step=(?=\d{1,12}, skipped=))(\d{1,12})\b")
# Longer than any job: timers that add up to more are damaged.
_MAX_NS = 1 << 60


class DeepSpeedLogImporter:
    """Importer of DeepSpeed logs."""

    format = "deepspeed-log"
    recognition = Recognition.WORDS
    stage = Stage.JOB

    def matches(self, source: Source) -> bool:
        return any(map(_SIGNATURES.search, first_log_lines(source)))

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        source = only_log(sources, "DeepSpeed")
        monitors = options.sources.get(MONITOR_FORMAT, ())
        dated = read_log(source, builder, monitors, options.run)
        return [] if dated else [source]


class DeepSpeedRun(RunReader):
    """Reads one run of a log of DeepSpeed."""

    def __init__(self, settings: JobSettings | None = None) -> None:
        super().__init__(settings)
        self.timers = TimerReader()
        self._ranks = OneRank()
        self._last_step = -1

    def feed(self, line: LogLine) -> None:
        super().feed(line)
        self.timers.feed(line, of_rank=self._ranks.has(line))
        if (step := _step_in(line.text)) is not None:
            self._last_step = step

    @property
    def iterations(self) -> int:
        return self.timers.count

    def restarts(self, line: LogLine) -> bool:
        # Several engines of a job count their steps in turn, and nearly alike.
        step = _step_in(line.text)
        return step is not None and 2 * step < self._last_step


def _step_in(text: str) -> int | None:
    match = _STEP.search(text) if "step=" in text else None
    return int(match.group(1)) if match else None


def read_log(
    source: Source,
    builder: TraceBuilder,
    monitors: Sequence[Source],
    choice: RunChoice = None,
) -> bool:
    """Add a run of a log to a trace; return whether it has times of day. The ranks that
    `monitors` cover get its phases."""
    run = chosen_run(source, read_runs(source, DeepSpeedRun, choice), choice, builder)
    timers, zone, settings = run.timers, run.zone, run.settings
    whole_steps = bool(timers.steps)
    timers.finish(settings.accumulation())
    if timers.steps and not whole_steps:
        builder.note(
            "the log has no timers of whole steps: iterations are made of its "
            "micro-steps"
        )
    phases = list(time_phases(timers.steps))
    timed = has_times(timers.steps, timers.marks)
    _check_times(source, phases, timed)
    for note in _missing_parts(timers, settings, timed):
        builder.note(note)
    offset_ns = clock_offset_ns(builder, zone) if timed else 0
    ranks = add_metadata(builder, settings, timers.marks, monitors)
    phase_ranks = sorted({0, *monitored_ranks(ranks, monitors)})
    for rank in phase_ranks:
        add_phases(ranks[rank], phases, timers.steps, offset_ns)
        if not timed:
            ranks[rank].meta["gaps_recorded"] = False
    if len(ranks) > 1 and phases:
        others = (
            ": the other ranks, which wait for it, get the same phases"
            if len(phase_ranks) > 1
            else ""
        )
        builder.note(f"the log has timers of rank 0 only{others}")
    skipped = add_memory(ranks[0], timers.marks, phases, timed, offset_ns)
    if phases and settings.reports and not timers.marks:
        builder.note(
            "memory of Megatron's report is the peak since the job's start: it stands "
            "for all iterations"
        )
        add_peaks(ranks, settings.reports, phases[0].start_ns - offset_ns)
    if skipped:
        builder.note(f"memory marks without a time or a phase are left out: {skipped}")
    if phases:
        mark = timers.steps[0].micro_steps[0].marked_ns.get((FORWARD, True))
        start = min(phases[0].start_ns, phases[0].start_ns if mark is None else mark)
        for entry in ranks.values():
            entry.meta["first_iteration_start_ns"] = start - offset_ns
    return timed


def _check_times(source: Source, phases: Sequence[TimedPhase], timed: bool) -> None:
    """Raise SourceError for a log without times, or with impossible ones."""
    if not phases and not timed:
        raise SourceError(
            f"{source} has neither timers of a step nor memory marks with times: turn "
            "on wall_clock_breakdown (and "
            "memory_breakdown) in the DeepSpeed configuration"
        )
    if phases and phases[-1].end_ns - phases[0].start_ns > _MAX_NS:
        raise source.damaged("its timers add up to decades")


def _missing_parts(
    timers: TimerReader, settings: JobSettings, timed: bool
) -> Iterator[str]:
    """Yield a note for each part that the log does not have, or has with limits."""
    if not timers.steps:
        yield (
            "the log has no timers of whole steps, so no phases: turn on "
            "wall_clock_breakdown"
        )
    elif not timed:
        yield (
            "the log has no times of day: phases are placed one after another, and "
            "gaps are not known"
        )
    if not timers.marks:
        if not settings.reports:
            yield "the log has no memory marks: turn on memory_breakdown"
    else:
        yield (
            "allocated and reserved memory between two marks of the log is the peak "
            "between them, reserved in whole GiB"
        )
    if settings.config is None:
        damaged = "a damaged" if settings.config_damaged else "no"
        yield (
            f"the log has {damaged} DeepSpeed configuration (json = ...): ratio, "
            "stride and offload are not known"
        )
    if settings.params() is None and not settings.subgroups:
        yield "the log does not state the number of parameters"


def add_metadata(
    builder: TraceBuilder,
    settings: JobSettings,
    marks: list[MemoryMark],
    monitors: Sequence[Source],
) -> dict[int, RankBuilder]:
    """Add the settings to a trace, and an entry for each rank.

    Return the builders of the ranks, rank 0 first.
    """
    meta: dict[str, Any] = builder.meta
    if settings.command is not None:
        try:
            meta["command"] = shlex.split(settings.command)
        except ValueError:
            meta["command"] = settings.command.split()
    # The share has one decimal: the largest share gives the host's memory with the
    # smallest error.
    hosts = (mark.host for mark in marks if mark.host)
    host = max(hosts, key=lambda memory: memory.share, default=HostMemoryMark(0, 0.0))
    if host.share > 0:
        capacity = round(host.used_bytes / host.share)
        meta["host"] = {
            "cpu": {"device": "cpu", "kind": "cpu", "capacity_bytes": capacity}
        }
    subgroups = settings.subgroups.get(0, {})
    meta["deepspeed"] = {
        "version": settings.deepspeed,
        "config": settings.config,
        "subgroup_params": [subgroups[key] for key in sorted(subgroups)] or None,
        "activation_checkpointing": settings.checkpointing or None,
    }
    ranks = add_ranks(builder, settings, monitors)
    shard, total = settings.shard_params(), settings.params()
    for rank, entry in ranks.items():
        entry.meta["model"] = {
            "total_params": total,
            "params": shard if shard is not None else total,
        }
        if settings.optimizer is not None:
            entry.meta["optimizers"] = [{"class": settings.optimizer, "params": shard}]
        if settings.omp_threads is not None:
            entry.meta["threads"] = {"torch": None, "omp": settings.omp_threads}
        if rank == 0 or settings.torch is not None:
            entry.meta.update({"torch": settings.torch, "cuda": settings.cuda})
    return ranks


@dataclass(frozen=True)
class TimedPhase:
    """Phase with its times in ns on the log's clock.

    If the log has no times, the clock begins at 0.
    """

    iteration: int
    micro_step: int
    phase: str
    start_ns: int
    end_ns: int


# Identity of a phase in a log: iteration, micro-step, phase.
PhaseKey = tuple[int, int, str]


def has_times(steps: list[StepTimers], marks: list[MemoryMark]) -> bool:
    """Return whether the log has times for its steps.

    If it has no steps, return whether it has times for its memory marks.
    """
    micro_steps = [micro_step for step in steps for micro_step in step.micro_steps]
    if not micro_steps:
        return any(mark.t_ns is not None for mark in marks)
    return any(
        micro_step.ended_ns is not None or micro_step.marked_ns
        for micro_step in micro_steps
    )


def time_phases(steps: list[StepTimers]) -> Iterator[TimedPhase]:
    """Yield the phases of all steps with their times.

    Durations are taken from the log. A phase begins at the mark before it, unless it
    would then end after the mark that follows it: DeepSpeed takes the marks of the
    backward within its timer. (A mark has the time of its end.) Without marks a phase
    ends where the next begins, and a step at the line with its timers.
    """
    next_start_ns: int | None = None
    starts = []
    for step in reversed(steps):
        # A step whose lines have lost their times is placed before the next one.
        starts.append(
            _latest_starts(step, None if has_times([step], []) else next_start_ns)
        )
        next_start_ns = starts[-1][0]
    previous_end_ns: int | None = None
    for iteration, (step, step_starts) in enumerate(
        zip(steps, reversed(starts), strict=True)
    ):
        for (number, phase), length, start in zip(
            _phases(step), _lengths_ns(step), step_starts, strict=True
        ):
            # No phase begins before the previous phase has ended.
            start_ns = max(
                (t for t in (start, previous_end_ns) if t is not None), default=0
            )
            previous_end_ns = start_ns + length
            yield TimedPhase(iteration, number, phase, start_ns, previous_end_ns)


def boundary_time_ns(
    boundary: PhaseBoundary | None, phases: dict[PhaseKey, TimedPhase]
) -> int | None:
    """Return the time of a boundary (None: no such phase).

    Without an update, it is the end of the backward.
    """
    if boundary is None:
        return None
    phase = phases.get((boundary.iteration, boundary.micro_step, boundary.phase))
    if phase is not None:
        return phase.start_ns if boundary.begins else phase.end_ns
    if boundary.phase != UPDATE:
        return None
    backward = phases.get((boundary.iteration, boundary.micro_step, BACKWARD))
    return None if backward is None else backward.end_ns


def _phases(step: StepTimers) -> list[tuple[int, str]]:
    """Return (micro-step, phase) for each phase of a step, in order."""
    last = len(step.micro_steps) - 1
    return [
        *(
            (number, phase)
            for number in range(last + 1)
            for phase in (FORWARD, BACKWARD)
        ),
        (last, UPDATE),
    ]


def _latest_starts(step: StepTimers, next_start_ns: int | None) -> list[int | None]:
    """Return the latest start of each phase.

    `next_start_ns` is the start of the next step; None: by this step's times.
    """
    starts = []
    for (number, phase), length in zip(
        reversed(_phases(step)), reversed(_lengths_ns(step)), strict=True
    ):
        micro_step = step.micro_steps[number]
        # The mark after the update follows the timers, and belongs to the marks of the
        # next micro-step.
        mark_after = (
            micro_step.marked_ns.get((phase, False)) if phase != UPDATE else None
        )
        ends = [
            t for t in (next_start_ns, micro_step.ended_ns, mark_after) if t is not None
        ]
        mark_before = micro_step.marked_ns.get((phase, True))
        begins = [mark_before] if mark_before is not None else []
        next_start_ns = min(begins + [t - length for t in ends], default=None)
        starts.append(next_start_ns)
    return starts[::-1]


def _lengths_ns(step: StepTimers) -> list[int]:
    """Return the length of each phase of a step. The sums over micro-steps are the
    figures of the step, which are exact: the last micro-step absorbs the rounding of
    the others."""
    by_phase = []
    for phase in (FORWARD, BACKWARD):
        lengths = [round(micro_step.ms[phase] * 1e6) for micro_step in step.micro_steps]
        total, others = round(step.ms[phase] * 1e6), sum(lengths[:-1])
        if others > total:
            scale = total / sum(lengths)
            lengths = [int(length * scale) for length in lengths]
            others = sum(lengths[:-1])
        by_phase.append([*lengths[:-1], total - others])
    return [
        *(length for pair in zip(*by_phase, strict=True) for length in pair),
        round(step.ms[UPDATE] * 1e6),
    ]


def add_phases(
    entry: RankBuilder,
    phases: list[TimedPhase],
    steps: list[StepTimers],
    offset_ns: int,
) -> None:
    """Add the phases, and the parts of backward and update as ops."""
    spans: dict[tuple[int, str], tuple[int, int]] = {}
    for phase in phases:
        start, end = phase.start_ns - offset_ns, phase.end_ns - offset_ns
        spans[phase.iteration, phase.phase] = start, end
        entry.phase(phase.phase, start, end, phase.iteration, phase.micro_step)
    for iteration, step in enumerate(steps):
        begin, _ = spans[iteration, BACKWARD]
        for name, ms in step.backward.items() if len(step.micro_steps) == 1 else ():
            end = begin + round(ms * 1e6)
            _add_op(entry, name, begin, end, iteration)
            begin = end
        # The timers of an update are printed at its end. The all-gather is its last
        # part, wherever it is printed.
        begin, end = spans[iteration, UPDATE]
        parts = sorted(
            step.update_parts, key=lambda part: part.name == "optimizer_allgather"
        )
        own: list[UpdatePart] = []
        earlier_ns = begin
        for part in reversed(parts):
            printed_ns = end if part.t_ns is None else part.t_ns - offset_ns
            if printed_ns > begin:
                own.insert(0, part)
                continue
            earlier_ns = min(earlier_ns, printed_ns)
            length_ns = round(part.ms * 1e6)
            _add_op(entry, part.name, earlier_ns - length_ns, earlier_ns, iteration)
            earlier_ns -= length_ns
        printed = [part.t_ns - offset_ns for part in own if part.t_ns is not None]
        placed = _place_parts(own, begin, min([end, *printed[-1:]]))
        for name, start_ns, end_ns in placed:
            _add_op(entry, name, start_ns, end_ns, iteration)


# Share by which timers of parts exceed the time of the whole without being nested.
_TIMER_ERROR = 0.01


def _place_parts(
    parts: list[UpdatePart], begin: int, end: int
) -> Iterator[tuple[str, int, int]]:
    """Yield the name, start and end of each timer within an interval.

    Timers follow each other up to its end if it is long enough for all of them; else
    the longest contains the others. A timer that is longer than the interval is left
    out."""
    while parts:
        longest_ns = (end - begin) * (1 + _TIMER_ERROR)
        parts = [part for part in parts if part.ms * 1e6 <= longest_ns]
        if sum(part.ms * 1e6 for part in parts) <= longest_ns:
            for part in reversed(parts):
                start = end - round(part.ms * 1e6)
                yield part.name, start, end
                end = start
            return
        parent = max(parts, key=lambda part: part.ms)
        begin = end - round(parent.ms * 1e6)
        yield parent.name, begin, end
        parts = [part for part in parts if part is not parent]


def _add_op(
    entry: RankBuilder, name: str, start: int, end: int, iteration: int
) -> None:
    entry.add(
        "ops",
        start_ns=start,
        end_ns=end,
        resource="host",
        name=name,
        iteration=iteration,
    )


def add_memory(
    entry: RankBuilder,
    marks: list[MemoryMark],
    phases: list[TimedPhase],
    timed: bool,
    offset_ns: int,
) -> int:
    """Add the memory of the marks, at boundaries of phases unless `timed`.

    Return how many have no time.
    """
    device = entry.meta["devices"][0]["device"]
    by_key = {
        (phase.iteration, phase.micro_step, phase.phase): phase for phase in phases
    }
    previous: MemoryMark | None = None
    previous_ns = peak_allocated = peak_reserved = skipped = 0
    for mark in marks:
        # Each mark resets the peaks; the peaks of a mark without a time go to the next
        # mark.
        peak_allocated = max(peak_allocated, mark.peak_allocated)
        peak_reserved = max(peak_reserved, mark.peak_reserved, mark.reserved)
        t_ns = (
            mark.t_ns
            if timed and mark.t_ns is not None
            else boundary_time_ns(mark.boundary, by_key)
        )
        if t_ns is None:
            skipped += 1
            continue
        if previous is not None and t_ns > previous_ns:
            # The peak holds for the whole interval between two marks: no memory in use
            # may count as free.
            entry.memory(
                previous_ns - offset_ns + 1, peak_allocated, "allocated", device
            )
            entry.memory(
                previous_ns - offset_ns + 1,
                max(peak_reserved, previous.reserved),
                "reserved",
                device,
            )
        entry.memory(t_ns - offset_ns, mark.allocated, "allocated", device)
        entry.memory(t_ns - offset_ns, mark.reserved, "reserved", device)
        if mark.host is not None:
            entry.memory(t_ns - offset_ns, mark.host.used_bytes, "host", "cpu")
        previous, previous_ns, peak_allocated, peak_reserved = mark, t_ns, 0, 0
    return skipped
