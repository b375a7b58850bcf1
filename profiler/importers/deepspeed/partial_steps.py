"""Derives the steps of a log that has no timers of whole steps: from timers of micro-steps, else from memory marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ebbtide.phases import BACKWARD, FORWARD, UPDATE
from ebbtide.profiler.importers.deepspeed.log_data import MarkedPhase, MemoryMark, MicroStep, PhaseBoundary, StepTimers

# Where the accumulation is not configured: a micro-step whose `step` takes at least this share of the longest updates.
# In the others the engine only counts.
_MIN_UPDATE_SHARE = 0.1


def steps_of_micro_steps(
    micro_steps: Sequence[MicroStep], marks: list[MemoryMark], accumulation: int | None
) -> list[StepTimers]:
    """Group micro-steps into steps, and number the boundaries of the marks by step.

    Args:
        micro_steps: All micro-steps, in order.
        marks: The marks, whose boundaries count all micro-steps from 0; they are replaced.
        accumulation: Micro-steps of a step by the configuration; None if not known.

    Returns:
        The complete steps.
    """
    updates_ms = [micro_step.ms.get(UPDATE, 0.0) for micro_step in micro_steps]
    longest_ms = max(updates_ms, default=0.0)
    steps: list[StepTimers] = []
    group: list[MicroStep] = []
    keys = []
    for number, (micro_step, update_ms) in enumerate(zip(micro_steps, updates_ms, strict=True), 1):
        keys.append((len(steps), len(group)))
        group.append(micro_step)
        ends = number % accumulation == 0 if accumulation else update_ms >= _MIN_UPDATE_SHARE * longest_ms
        if ends:
            sums = {phase: sum(m.ms.get(phase, 0.0) for m in group) for phase in (FORWARD, BACKWARD)}
            parts = [part for m in group for part in m.update_parts]
            steps.append(StepTimers({**sums, UPDATE: update_ms}, group, {}, parts))
            group = []
    keys.append((len(steps), len(group)))
    for index, mark in enumerate(marks):
        if mark.boundary is not None and mark.boundary.micro_step < len(keys):
            iteration, micro_number = keys[mark.boundary.micro_step]
            marks[index] = replace(mark, boundary=replace(mark.boundary, iteration=iteration, micro_step=micro_number))
    return steps


def micro_steps_of_marks(marks: list[MemoryMark]) -> list[MicroStep]:
    """Derive micro-steps from the times of memory marks, and number the boundaries of the marks by micro-step.

    Returns:
        The micro-steps with a forward and a backward, as long as the times between their marks.
    """
    micro_steps: list[MicroStep] = []
    times: dict[MarkedPhase, int] = {}

    def finish() -> None:
        micro_step = _micro_step(times)
        if micro_step is not None:
            micro_steps.append(micro_step)

    for index, mark in enumerate(marks):
        boundary = mark.boundary
        if boundary is None or mark.t_ns is None:
            continue
        if boundary.begins and boundary.phase == FORWARD and times:
            finish()
            times = {}
        times[MarkedPhase(boundary.phase, boundary.begins)] = mark.t_ns
        marks[index] = replace(mark, boundary=PhaseBoundary(0, len(micro_steps), boundary.phase, boundary.begins))
    finish()
    return micro_steps


def _micro_step(times: dict[MarkedPhase, int]) -> MicroStep | None:
    """Return the micro-step between marks; None without both ends of a forward and a backward."""
    points = [
        times.get(MarkedPhase(FORWARD, True)),
        times.get(MarkedPhase(FORWARD, False), times.get(MarkedPhase(BACKWARD, True))),
        times.get(MarkedPhase(BACKWARD, True), times.get(MarkedPhase(FORWARD, False))),
        times.get(MarkedPhase(BACKWARD, False), times.get(MarkedPhase(UPDATE, True))),
    ]
    edges_ns = [point for point in points if point is not None]
    if len(edges_ns) < len(points):
        return None
    update_start, update_end = times.get(MarkedPhase(UPDATE, True), edges_ns[3]), times.get(MarkedPhase(UPDATE, False))
    lengths_ns = {FORWARD: edges_ns[1] - edges_ns[0], BACKWARD: edges_ns[3] - edges_ns[2]}
    if update_end is not None:
        lengths_ns[UPDATE] = update_end - update_start
    ms = {phase: max(length, 0) / 1e6 for phase, length in lengths_ns.items()}
    return MicroStep(ms, dict(times), update_end if update_end is not None else edges_ns[3])
