"""Places the phases of DeepSpeed steps in time, from the timers and memory marks of a log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ebbtide.phases import BACKWARD, FORWARD, UPDATE
from ebbtide.profiler.importers.deepspeed.log_data import MarkedPhase, MemoryMark, PhaseBoundary, StepTimers


@dataclass(frozen=True)
class TimedPhase:
    """Phase with its times in ns on the log's clock, or on a clock that begins at 0 if the log has no times."""

    iteration: int
    micro_step: int
    phase: str
    start_ns: int
    end_ns: int


class PhaseKey(NamedTuple):
    """Identity of a phase in a log."""

    iteration: int
    micro_step: int
    phase: str


def has_times(steps: list[StepTimers], marks: list[MemoryMark]) -> bool:
    """Return whether the log has times for its steps, or for its memory marks if it has no steps."""
    micro_steps = [micro_step for step in steps for micro_step in step.micro_steps]
    if not micro_steps:
        return any(mark.t_ns is not None for mark in marks)
    return any(micro_step.ended_ns is not None or micro_step.marked_ns for micro_step in micro_steps)


def time_phases(steps: list[StepTimers]) -> Iterator[TimedPhase]:
    """Yield the phases of all steps with their times.

    Durations are those of the log, exact to 10 us. A phase begins at the mark before it, unless it would then end after
    the mark that follows it: today's DeepSpeed takes the marks of the backward within its timer. (Taking a mark is
    slow, and its time is that of its end.) Without marks a phase ends where the next phase begins, and a step ends at
    the time of the line with its timers.
    """
    next_start_ns: int | None = None
    starts = []
    for step in reversed(steps):
        # A step whose lines have lost their times is placed before the next one.
        starts.append(_latest_starts(step, None if has_times([step], []) else next_start_ns))
        next_start_ns = starts[-1][0]
    previous_end_ns: int | None = None
    for iteration, (step, step_starts) in enumerate(zip(steps, reversed(starts), strict=True)):
        for (number, phase), length, start in zip(_phases(step), _lengths_ns(step), step_starts, strict=True):
            # No phase begins before the previous phase has ended.
            start_ns = max((t for t in (start, previous_end_ns) if t is not None), default=0)
            previous_end_ns = start_ns + length
            yield TimedPhase(iteration, number, phase, start_ns, previous_end_ns)


def boundary_time_ns(boundary: PhaseBoundary | None, phases: dict[PhaseKey, TimedPhase]) -> int | None:
    """Return the time of a boundary; None if its phase is not in `phases`.

    In a micro-step without an update, both boundaries of the update are at the end of the backward.
    """
    if boundary is None:
        return None
    phase = phases.get(PhaseKey(boundary.iteration, boundary.micro_step, boundary.phase))
    if phase is not None:
        return phase.start_ns if boundary.begins else phase.end_ns
    if boundary.phase != UPDATE:
        return None
    backward = phases.get(PhaseKey(boundary.iteration, boundary.micro_step, BACKWARD))
    return None if backward is None else backward.end_ns


def _phases(step: StepTimers) -> list[tuple[int, str]]:
    """Return (micro-step, phase) for each phase of a step, in order."""
    last = len(step.micro_steps) - 1
    return [*((number, phase) for number in range(last + 1) for phase in (FORWARD, BACKWARD)), (last, UPDATE)]


def _latest_starts(step: StepTimers, next_start_ns: int | None) -> list[int | None]:
    """Return the latest start of each phase that the marks and the next phase allow.

    Args:
        step: The step.
        next_start_ns: Start of the next step; None if the times of this step decide.
    """
    starts = []
    for (number, phase), length in zip(reversed(_phases(step)), reversed(_lengths_ns(step)), strict=True):
        micro_step = step.micro_steps[number]
        # The mark after the update follows the timers, and belongs to the marks of the next micro-step.
        mark_after = micro_step.marked_ns.get(MarkedPhase(phase, False)) if phase != UPDATE else None
        ends = [t for t in (next_start_ns, micro_step.ended_ns, mark_after) if t is not None]
        mark_before = micro_step.marked_ns.get(MarkedPhase(phase, True))
        begins = [mark_before] if mark_before is not None else []
        next_start_ns = min(begins + [t - length for t in ends], default=None)
        starts.append(next_start_ns)
    return starts[::-1]


def _lengths_ns(step: StepTimers) -> list[int]:
    """Return the length of each phase of a step.

    The sums over micro-steps are the figures of the step, which are exact: the last micro-step absorbs the rounding of
    the others.
    """
    by_phase = []
    for phase in (FORWARD, BACKWARD):
        lengths = [round(micro_step.ms[phase] * 1e6) for micro_step in step.micro_steps]
        total, others = round(step.ms[phase] * 1e6), sum(lengths[:-1])
        if others > total:
            scale = total / sum(lengths)
            lengths = [int(length * scale) for length in lengths]
            others = sum(lengths[:-1])
        by_phase.append([*lengths[:-1], total - others])
    return [*(length for pair in zip(*by_phase, strict=True) for length in pair), round(step.ms[UPDATE] * 1e6)]
