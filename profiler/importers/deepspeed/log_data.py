"""Timers and memory marks that a DeepSpeed log contains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class PhaseBoundary:
    """Begin or end of a phase.

    Attributes:
        iteration: Number of the step in the log.
        micro_step: Number of the micro-step in the step.
        phase: Name of the phase.
        begins: True for the begin, False for the end.
    """

    iteration: int
    micro_step: int
    phase: str
    begins: bool


class MarkedPhase(NamedTuple):
    """Position of a memory mark in a micro-step.

    Attributes:
        phase: Name of the phase.
        begins: True for a mark before the phase, False for a mark after it.
    """

    phase: str
    begins: bool


class UpdatePart(NamedTuple):
    """Timer of a part of an update.

    Attributes:
        name: Name of the timer.
        ms: Duration.
        t_ns: Time of the line; None if the line has no time.
    """

    name: str
    ms: float
    t_ns: int | None


class HostMemory(NamedTuple):
    """Memory in use on the whole host.

    Attributes:
        used_bytes: Bytes in use.
        share: Bytes in use as a share of the host's memory, with one decimal of a percent.
    """

    used_bytes: int
    share: float


@dataclass
class MicroStep:
    """Timers and marks of one micro-step, as far as the log has them.

    Attributes:
        ms: Duration of each phase.
        marked_ns: Times of the memory marks in it.
        ended_ns: Time of the line with its timers, which are printed at its end; None if the line has no time.
        update_parts: Timers of the parts of its update that were printed before it.
    """

    ms: dict[str, float]
    marked_ns: dict[MarkedPhase, int]
    ended_ns: int | None
    update_parts: list[UpdatePart] = field(default_factory=list)


@dataclass
class StepTimers:
    """Timers of one iteration.

    Attributes:
        ms: Duration of each phase, as printed for the step.
        micro_steps: Its micro-steps, at least one.
        backward: Durations of the parts of the backward in ms.
        update_parts: Timers of the parts of the update.
    """

    ms: dict[str, float]
    micro_steps: list[MicroStep]
    backward: dict[str, float]
    update_parts: list[UpdatePart]


@dataclass
class MemoryMark:
    """Memory that DeepSpeed printed at one point, in bytes.

    Attributes:
        t_ns: Time of the line; None if the line has no time.
        boundary: Begin or end of the phase at which it was printed; None for other marks.
        allocated: Allocated now.
        peak_allocated: Peak since the previous mark.
        reserved: Reserved now.
        peak_reserved: Peak since the previous mark, rounded to GiB.
        host: Memory of the whole host; None if the log does not have it.
    """

    t_ns: int | None
    boundary: PhaseBoundary | None
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    host: HostMemory | None = None
