"""When each phase of a DeepSpeed step ran, from the durations and marks that its log has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.profiler.importers.deepspeed.durations import PHASES, Mark, Point, Step


@dataclass(frozen=True)
class Placed:
    """A phase with its times, ns on the log's clock; on one that begins at 0 where the log has no times."""

    iteration: int
    micro_step: int
    phase: str
    start_ns: int
    end_ns: int


def dated(steps: list[Step], marks: list[Mark]) -> bool:
    """Whether the log tells when its steps were, or its memory marks where it has no steps."""
    micro_steps = [micro for step in steps for micro in step.micro_steps]
    if not micro_steps:
        return any(mark.t_ns is not None for mark in marks)
    return any(micro.ended_ns is not None or micro.marked_ns for micro in micro_steps)


def place(steps: list[Step]) -> Iterator[Placed]:
    """Give each phase its times. Durations are the log's own, to 10 us. A phase begins at the mark before it (taking
    one is slow, and the time on it is that of its end), unless it would end after the mark behind it: today's DeepSpeed
    takes those of backward within the timer. Without marks it ends where what follows begins, and a step ends where its
    timers were printed."""
    following: int | None = None
    starts = []
    for step in reversed(steps):
        # A step whose lines lost their times stands before the next one.
        starts.append(_starts(step, None if dated([step], []) else following))
        following = starts[-1][0]
    reached: int | None = None
    for iteration, (step, wanted) in enumerate(zip(steps, reversed(starts), strict=True)):
        for (number, phase), length, start in zip(_phases(step), _lengths(step), wanted, strict=True):
            # Nothing begins before what comes before it has ended.
            begin = max((t for t in (start, reached) if t is not None), default=0)
            reached = begin + length
            yield Placed(iteration, number, phase, begin, reached)


def time_of(point: Point | None, placed: dict[tuple[int, int, str], Placed]) -> int | None:
    """When a phase began or ended; where a micro-step has no update, when its backward ended. None: not known."""
    if point is None:
        return None
    found = placed.get((point.iteration, point.micro_step, point.phase))
    if found is not None:
        return found.start_ns if point.begins else found.end_ns
    before = placed.get((point.iteration, point.micro_step, "backward")) if point.phase == "update" else None
    return None if before is None else before.end_ns


def _phases(step: Step) -> list[tuple[int, str]]:
    """(micro-step, phase) in their order."""
    last = len(step.micro_steps) - 1
    return [*((number, phase) for number in range(last + 1) for phase in PHASES[:2]), (last, "update")]


def _starts(step: Step, following: int | None) -> list[int | None]:
    """When each phase would begin if what follows it begins where it may. following: when the next step does."""
    starts = []
    for (number, phase), length in zip(reversed(_phases(step)), reversed(_lengths(step)), strict=True):
        micro = step.micro_steps[number]
        # The mark after the update stands behind the timers, and with those of the next micro-step.
        over = (micro.ended_ns, micro.marked_ns.get((phase, False)) if phase != "update" else None)
        ends = [t for t in (following, *over) if t is not None]
        begins = [t for t in (micro.marked_ns.get((phase, True)),) if t is not None]
        following = min(begins + [t - length for t in ends], default=None)
        starts.append(following)
    return starts[::-1]


def _lengths(step: Step) -> list[int]:
    """Of the phases, ns. The sums over micro-steps are the step's own figures, which are the exact ones: the last
    micro-step makes up for the rounding of the others."""
    by_phase = []
    for phase in PHASES[:2]:
        of_micro = [round(micro.ms[phase] * 1e6) for micro in step.micro_steps]
        whole, others = round(step.ms[phase] * 1e6), sum(of_micro[:-1])
        if others > whole:
            scale = whole / sum(of_micro)
            of_micro = [int(length * scale) for length in of_micro]
            others = sum(of_micro[:-1])
        by_phase.append([*of_micro[:-1], whole - others])
    return [*(length for pair in zip(*by_phase, strict=True) for length in pair), round(step.ms["update"] * 1e6)]
