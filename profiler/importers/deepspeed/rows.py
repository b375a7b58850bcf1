"""Adds the phases, ops and memory of a DeepSpeed log to the tables of a trace."""

from __future__ import annotations

from ebbtide.phases import BACKWARD, UPDATE
from ebbtide.profiler.importers.deepspeed.log_data import MemoryMark, StepTimers
from ebbtide.profiler.importers.deepspeed.phases import PhaseKey, TimedPhase, boundary_time_ns
from ebbtide.profiler.trace import RankBuilder


def add_phases(entry: RankBuilder, phases: list[TimedPhase], steps: list[StepTimers], offset_ns: int) -> None:
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
        # The timers of an update are printed at its end. The all-gather is its last part, wherever it is printed.
        _, end = spans[iteration, UPDATE]
        parts = sorted(step.update_parts, key=lambda part: part.name == "optimizer_allgather")
        for part in reversed(parts):
            end = end if part.t_ns is None else min(end, part.t_ns - offset_ns)
            length_ns = round(part.ms * 1e6)
            _add_op(entry, part.name, end - length_ns, end, iteration)
            end -= length_ns


def _add_op(entry: RankBuilder, name: str, start: int, end: int, iteration: int) -> None:
    entry.add("ops", start_ns=start, end_ns=end, resource="host", name=name, iteration=iteration)


def add_memory(
    entry: RankBuilder, marks: list[MemoryMark], phases: list[TimedPhase], timed: bool, offset_ns: int
) -> int:
    """Add the memory of the marks.

    Args:
        entry: Builder of rank 0.
        marks: The marks.
        phases: The phases of the log.
        timed: Whether the log has times; if not, marks are placed at the boundaries of phases.
        offset_ns: Offset of the log's clock from UTC.

    Returns:
        The number of marks without a time.
    """
    device = entry.meta["devices"][0]["device"]
    by_key = {PhaseKey(phase.iteration, phase.micro_step, phase.phase): phase for phase in phases}
    previous: MemoryMark | None = None
    previous_ns = peak_allocated = peak_reserved = skipped = 0
    for mark in marks:
        # Each mark resets the peaks; the peaks of a mark without a time go to the next mark.
        peak_allocated = max(peak_allocated, mark.peak_allocated)
        peak_reserved = max(peak_reserved, mark.peak_reserved, mark.reserved)
        t_ns = mark.t_ns if timed and mark.t_ns is not None else boundary_time_ns(mark.boundary, by_key)
        if t_ns is None:
            skipped += 1
            continue
        if previous is not None and t_ns > previous_ns:
            # Between two marks only the peak is known. It is used for the whole interval, so that no memory counts as
            # free that may have been in use.
            entry.memory(previous_ns - offset_ns + 1, peak_allocated, "allocated", device)
            entry.memory(previous_ns - offset_ns + 1, max(peak_reserved, previous.reserved), "reserved", device)
        entry.memory(t_ns - offset_ns, mark.allocated, "allocated", device)
        entry.memory(t_ns - offset_ns, mark.reserved, "reserved", device)
        if mark.host is not None:
            entry.memory(t_ns - offset_ns, mark.host.used_bytes, "host", "cpu")
        previous, previous_ns, peak_allocated, peak_reserved = mark, t_ns, 0, 0
    return skipped
