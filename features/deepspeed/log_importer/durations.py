"""Reads the timers and memory marks of a DeepSpeed log."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ebbtide.features.importers.logs.text_log import LogLine
from ebbtide.phases import BACKWARD, FORWARD, PHASES, UPDATE


@dataclass(frozen=True)
class PhaseBoundary:
    """Begin or end of a phase."""

    iteration: int
    micro_step: int
    phase: str
    begins: bool


# Position of a memory mark in a micro-step: the phase, and whether it begins there.
MarkedPhase = tuple[str, bool]


class UpdatePart(NamedTuple):
    """Timer of a part of an update.

    `t_ns`: time of the line, None if the line has no time.
    """

    name: str
    ms: float
    t_ns: int | None


class HostMemoryMark(NamedTuple):
    """Memory in use on the whole host.

    `share` of the host's memory has one decimal of a percent.
    """

    used_bytes: int
    share: float


@dataclass
class MicroStep:
    """Timers and marks of one micro-step.

    `ended_ns`: time of the line with its timers, None without one.
    """

    ms: dict[str, float]
    marked_ns: dict[MarkedPhase, int]
    ended_ns: int | None
    update_parts: list[UpdatePart] = field(default_factory=list)


@dataclass
class StepTimers:
    """Timers of one iteration, which has at least one micro-step."""

    ms: dict[str, float]
    micro_steps: list[MicroStep]
    backward: dict[str, float]
    update_parts: list[UpdatePart]


@dataclass
class MemoryMark:
    """Memory that DeepSpeed printed at one point, in bytes."""

    t_ns: int | None  # Time of the line; None if the line has no time
    # Begin or end of the phase at which it was printed; None for other marks
    boundary: PhaseBoundary | None
    allocated: int
    peak_allocated: int  # Peak since the previous mark
    reserved: int
    peak_reserved: int  # Peak since the previous mark, rounded to GiB
    # Memory of the whole host; None if the log does not have it
    host: HostMemoryMark | None = None


# DeepSpeed writes two decimals: fewer mean that the line was cut.
_TIMER = re.compile(r"\s*([\w ./()-]{1,64}?)\s*:\s*(\d{1,9}\.\d\d)(?!\d)")
_RANK = re.compile(r"\[Rank (\d{1,7})\] (?:rank=\d{1,7} )?$")
# By version of DeepSpeed: `fwd` is `forward` before 0.10.
_TIMER_NAMES = {
    FORWARD: ("fwd", "forward"),
    BACKWARD: ("bwd", "backward"),
    UPDATE: ("step",),
}
_PHASE_TIMERS = {
    name + suffix
    for names in _TIMER_NAMES.values()
    for name in names
    for suffix in ("", "_microstep")
}
_WITHIN_BACKWARD = (
    "bwd_inner",
    "bwd_allreduce",
    "backward_inner",
    "backward_allreduce",
)
_MARK = re.compile(r"\bEngine (before|after) (forward|backward|step)\b")
_MARKED_PHASES = {"forward": FORWARD, "backward": BACKWARD, "step": UPDATE}
_SIZE = r"(\d{1,7}(?:\.\d{1,9})?)"
_MEMORY = re.compile(
    rf"\bMA {_SIZE} GB\s{{1,20}}Max_MA {_SIZE} GB\s{{1,20}}CA {_SIZE} "
    rf"GB\s{{1,20}}Max_CA {_SIZE} GB"
)
_HOST = re.compile(
    rf"CPU Virtual Memory:\s{{1,20}}used = {_SIZE} GB, percent = {_SIZE}%"
)
# Limits per step. A log with more is damaged.
_MAX_MICRO_STEPS = 1 << 16
_MAX_UPDATE_PARTS = 1 << 10
GIB = 2**30
# Accumulation not configured: updates are micro-steps whose `step` takes this share of
# the longest ones.
_MIN_UPDATE_SHARE = 0.1


class TimerReader:
    """Collects the timers of complete steps and the memory marks, line by line."""

    def __init__(self) -> None:
        self.steps: list[StepTimers] = []
        self.marks: list[MemoryMark] = []
        self._micro_steps: deque[MicroStep] = deque(maxlen=_MAX_MICRO_STEPS)
        self._update_parts: deque[UpdatePart] = deque(maxlen=_MAX_UPDATE_PARTS)
        self._marked_ns: dict[MarkedPhase, int] = {}
        self._boundary: PhaseBoundary | None = None

    @property
    def count(self) -> int:
        """Number of steps and of further micro-steps so far."""
        return len(self.steps) + len(self._micro_steps)

    def feed(self, line: LogLine, of_rank: bool = True) -> None:
        """Read a line. `of_rank`: whether it is of the rank whose memory is read."""
        if "time (ms)" in line.text:
            previous, *segments = line.text.split("time (ms)")
            for segment in segments:
                # A log has the timers of other ranks only on request.
                rank = _RANK.search(previous[-40:])
                if rank is None or int(rank.group(1)) == 0:
                    self._add_timers(_read_timers(segment), line.t_ns)
                previous = segment
        elif not of_rank:
            return
        elif "Engine " in line.text and (mark := _MARK.search(line.text)):
            self._boundary = self._boundary_at(
                _MARKED_PHASES[mark.group(2)], mark.group(1) == "before"
            )
        elif "Max_MA" in line.text and (memory := _MEMORY.search(line.text)):
            self._add_mark(
                line.t_ns, [round(float(value) * GIB) for value in memory.groups()]
            )
        elif (
            "CPU Virtual" in line.text
            and self.marks
            and (host := _HOST.search(line.text))
        ):
            used, percent = map(float, host.groups())
            self.marks[-1].host = HostMemoryMark(round(used * GIB), percent / 100)

    def finish(self, accumulation: int | None) -> None:
        """Derive steps where the log has no timers of whole ones.

        `accumulation` is as configured, None if not known.
        """
        if not self.steps:
            self.steps = steps_of_micro_steps(
                self._micro_steps, self.marks, accumulation
            )

    def _boundary_at(self, phase: str, begins: bool) -> PhaseBoundary:
        """Return the boundary of a mark.

        `Engine after step` is printed after the timers of the (micro-)step.
        """
        iteration, micro_step = len(self.steps), len(self._micro_steps)
        if phase == UPDATE and not begins:
            if self._micro_steps:
                micro_step -= 1
            elif self.steps:
                iteration, micro_step = (
                    iteration - 1,
                    len(self.steps[-1].micro_steps) - 1,
                )
        return PhaseBoundary(iteration, micro_step, phase, begins)

    def _add_mark(self, t_ns: int | None, sizes: list[int]) -> None:
        allocated, peak_allocated, reserved, peak_reserved = sizes
        boundary, self._boundary = self._boundary, None
        self.marks.append(
            MemoryMark(
                t_ns,
                boundary,
                allocated,
                max(allocated, peak_allocated),
                reserved,
                peak_reserved,
            )
        )
        if boundary is not None and t_ns is not None:
            self._marked_ns[boundary.phase, boundary.begins] = t_ns

    def _add_timers(self, timers: dict[str, float], t_ns: int | None) -> None:
        micro_step = _by_phase(timers, "_microstep")
        step = _by_phase(timers, "")
        if FORWARD in micro_step and BACKWARD in micro_step:
            self._micro_steps.append(
                MicroStep(micro_step, self._marked_ns, t_ns, list(self._update_parts))
            )
            self._update_parts.clear()
            self._marked_ns = {}
        elif len(step) == len(PHASES):
            micro_steps = _of_step(list(self._micro_steps), step) or [
                MicroStep(dict(step), self._marked_ns, t_ns)
            ]
            backward = {
                name: timers[name] for name in _WITHIN_BACKWARD if name in timers
            }
            parts = [
                part
                for micro_step in self._micro_steps
                for part in micro_step.update_parts
            ]
            self.steps.append(
                StepTimers(step, micro_steps, backward, [*parts, *self._update_parts])
            )
            self._micro_steps.clear()
            self._update_parts.clear()
            self._marked_ns = {}
        else:
            # Timers with this prefix belong to the setup, and are printed before the
            # first step.
            self._update_parts.extend(
                UpdatePart(name, ms, t_ns)
                for name, ms in timers.items()
                if name not in _PHASE_TIMERS and not name.startswith("init_")
            )


def _read_timers(text: str) -> dict[str, float]:
    """Read ` | fwd: 1.23 | bwd: 4.56` in ms, up to the first unfitting field."""
    timers = {}
    before, *timer_texts = text.split("|")
    for timer_text in timer_texts if not before.strip() else ():
        if (match := _TIMER.match(timer_text[:160])) is None:
            break
        timers[match.group(1)] = float(match.group(2))
    return timers


def _by_phase(timers: dict[str, float], suffix: str) -> dict[str, float]:
    """Return the timers of phases, by phase instead of by name."""
    values = {
        phase: [timers[n + suffix] for n in names if n + suffix in timers]
        for phase, names in _TIMER_NAMES.items()
    }
    return {phase: times[0] for phase, times in values.items() if times}


def _of_step(
    micro_steps: list[MicroStep], step_ms: dict[str, float]
) -> list[MicroStep]:
    """Return the last micro-steps, which add up to the step. Those before belong to a
    step that was interrupted."""
    target_ms = step_ms[FORWARD] + step_ms[BACKWARD]
    lengths_ms = [
        micro_step.ms[FORWARD] + micro_step.ms[BACKWARD] for micro_step in micro_steps
    ]
    sum_ms, first = sum(lengths_ms), 0
    while first < len(lengths_ms) - 1 and abs(
        sum_ms - lengths_ms[first] - target_ms
    ) < abs(sum_ms - target_ms):
        sum_ms -= lengths_ms[first]
        first += 1
    return micro_steps[first:]


def steps_of_micro_steps(
    micro_steps: Sequence[MicroStep], marks: list[MemoryMark], accumulation: int | None
) -> list[StepTimers]:
    """Group all micro-steps into complete steps.

    Number the boundaries of the marks by step. `marks`: their boundaries count
    micro-steps from 0; they are replaced. `accumulation`: None if not known.
    """
    updates_ms = [micro_step.ms.get(UPDATE, 0.0) for micro_step in micro_steps]
    longest_ms = max(updates_ms, default=0.0)
    steps: list[StepTimers] = []
    group: list[MicroStep] = []
    keys = []
    for number, (micro_step, update_ms) in enumerate(
        zip(micro_steps, updates_ms, strict=True), 1
    ):
        keys.append((len(steps), len(group)))
        group.append(micro_step)
        ends = (
            number % accumulation == 0
            if accumulation
            else update_ms >= _MIN_UPDATE_SHARE * longest_ms
        )
        if ends:
            sums = {
                phase: sum(m.ms.get(phase, 0.0) for m in group)
                for phase in (FORWARD, BACKWARD)
            }
            parts = [part for m in group for part in m.update_parts]
            steps.append(StepTimers({**sums, UPDATE: update_ms}, group, {}, parts))
            group = []
    keys.append((len(steps), len(group)))
    for index, mark in enumerate(marks):
        if mark.boundary is not None and mark.boundary.micro_step < len(keys):
            iteration, micro_number = keys[mark.boundary.micro_step]
            marks[index] = replace(
                mark,
                boundary=replace(
                    mark.boundary, iteration=iteration, micro_step=micro_number
                ),
            )
    return steps
