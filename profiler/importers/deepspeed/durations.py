"""Durations of steps and memory marks, as a DeepSpeed log has them."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from ebbtide.profiler.importers.text_log import Line

PHASES = ("forward", "backward", "update")
# DeepSpeed writes two decimals: fewer are of a line that was cut.
_TIMER = re.compile(r"\s*([\w ./()-]{1,64}?)\s*:\s*(\d{1,9}\.\d\d)(?!\d)")
_RANK = re.compile(r"\[Rank (\d{1,7})\] (?:rank=\d{1,7} )?$")
# By version: `fwd` is `forward` before 0.10.
_NAMES = {"forward": ("fwd", "forward"), "backward": ("bwd", "backward"), "update": ("step",)}
_OF_PHASES = {name + suffix for names in _NAMES.values() for name in names for suffix in ("", "_microstep")}
_WITHIN_BACKWARD = ("bwd_inner", "bwd_allreduce", "backward_inner", "backward_allreduce")
_MARK = re.compile(r"\bEngine (before|after) (forward|backward|step)\b")
_SIZE = r"(\d{1,7}(?:\.\d{1,9})?)"
_MEMORY = re.compile(rf"\bMA {_SIZE} GB\s{{1,20}}Max_MA {_SIZE} GB\s{{1,20}}CA {_SIZE} GB\s{{1,20}}Max_CA {_SIZE} GB")
_HOST = re.compile(rf"CPU Virtual Memory:\s{{1,20}}used = {_SIZE} GB, percent = {_SIZE}%")
# Of one step; more are of a log that is no log.
_MOST_MICRO_STEPS = 1 << 16
_MOST_PARTS = 1 << 10
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """Where a phase begins (or ends), in the order of the log."""

    iteration: int
    micro_step: int
    phase: str
    begins: bool


@dataclass
class MicroStep:
    """Milliseconds of each phase. marked_ns: the times of the marks at it, by (phase, whether before it); ended_ns: of
    the timers, which are printed when the micro-step is over. As far as the log tells."""

    ms: dict[str, float]
    marked_ns: dict[tuple[str, bool], int]
    ended_ns: int | None


@dataclass
class Step:
    """One iteration. ms: per phase, as the log has it. backward: its parts, ms. parts: (name, ms, time of the line) of
    the update."""

    ms: dict[str, float]
    micro_steps: list[MicroStep]
    backward: dict[str, float]
    parts: list[tuple[str, float, int | None]]


@dataclass
class Mark:
    """A memory line: bytes allocated and reserved, the most of each since the mark before, and what the whole host
    uses, in bytes and as a share of its memory. point: the end of a phase that it stands at."""

    t_ns: int | None
    point: Point | None
    allocated: int
    most_allocated: int
    reserved: int
    most_reserved: int
    host: tuple[int, float] | None = None


class TimesReader:
    """Collects steps and memory marks, line by line."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.marks: list[Mark] = []
        self._micro: deque[MicroStep] = deque(maxlen=_MOST_MICRO_STEPS)
        self._parts: deque[tuple[str, float, int | None]] = deque(maxlen=_MOST_PARTS)
        self._marked: dict[tuple[str, bool], int] = {}
        self._point: Point | None = None

    def feed(self, line: Line) -> None:
        if "time (ms)" in line.text:
            before, *pieces = line.text.split("time (ms)")
            for piece in pieces:
                # Of other ranks a log has the timers only where somebody asked for them.
                rank = _RANK.search(before[-40:])
                if rank is None or int(rank.group(1)) == 0:
                    self._timers(_read(piece), line.t_ns)
                before = piece
        elif "Engine " in line.text and (mark := _MARK.search(line.text)):
            self._point = self._at(mark.group(1) == "before", {"step": "update"}.get(mark.group(2), mark.group(2)))
        elif "Max_MA" in line.text and (memory := _MEMORY.search(line.text)):
            self._memory(line.t_ns, [round(float(value) * GIB) for value in memory.groups()])
        elif "CPU Virtual" in line.text and self.marks and (host := _HOST.search(line.text)):
            used, percent = map(float, host.groups())
            self.marks[-1].host = round(used * GIB), percent / 100

    def _at(self, begins: bool, phase: str) -> Point:
        """`Engine after step` comes when the timers of the micro-step, or of the whole step, have been printed."""
        iteration, micro_step = len(self.steps), len(self._micro)
        if phase == "update" and not begins:
            if self._micro:
                micro_step -= 1
            elif self.steps:
                iteration, micro_step = iteration - 1, len(self.steps[-1].micro_steps) - 1
        return Point(iteration, micro_step, phase, begins)

    def _memory(self, t_ns: int | None, sizes: list[int]) -> None:
        allocated, most_allocated, reserved, most_reserved = sizes
        point, self._point = self._point, None
        self.marks.append(Mark(t_ns, point, allocated, max(allocated, most_allocated), reserved, most_reserved))
        if point is not None and t_ns is not None:
            self._marked[point.phase, point.begins] = t_ns

    def _timers(self, timers: dict[str, float], t_ns: int | None) -> None:
        micro = _phases(timers, "_microstep")
        whole = _phases(timers, "")
        if "forward" in micro and "backward" in micro:
            self._micro.append(MicroStep(micro, self._marked, t_ns))
            self._marked = {}
        elif len(whole) == len(PHASES):
            micro_steps = _last(list(self._micro), whole) or [MicroStep(dict(whole), self._marked, t_ns)]
            backward = {name: timers[name] for name in _WITHIN_BACKWARD if name in timers}
            self.steps.append(Step(whole, micro_steps, backward, list(self._parts)))
            self._micro.clear()
            self._parts.clear()
            self._marked = {}
        else:
            # What is printed before the first step is of the setup.
            named = {name: ms for name, ms in timers.items() if name not in _OF_PHASES and not name.startswith("init_")}
            self._parts.extend((name, ms, t_ns) for name, ms in named.items())


def _read(text: str) -> dict[str, float]:
    """` | fwd: 1.23 | bwd: 4.56` in ms, as far as it goes on like that."""
    timers = {}
    before, *fields = text.split("|")
    for entry in fields if not before.strip() else ():
        if (match := _TIMER.match(entry[:160])) is None:
            break
        timers[match.group(1)] = float(match.group(2))
    return timers


def _phases(timers: dict[str, float], suffix: str) -> dict[str, float]:
    found = {phase: [timers[n + suffix] for n in names if n + suffix in timers] for phase, names in _NAMES.items()}
    return {phase: values[0] for phase, values in found.items() if values}


def _last(micro_steps: list[MicroStep], whole: dict[str, float]) -> list[MicroStep]:
    """The micro-steps that the figures of the whole step are of: those before are of a step that was broken off."""
    whole_ms = whole["forward"] + whole["backward"]
    lengths = [micro.ms["forward"] + micro.ms["backward"] for micro in micro_steps]
    rest, first = sum(lengths), 0
    while first < len(lengths) - 1 and abs(rest - lengths[first] - whole_ms) < abs(rest - whole_ms):
        rest -= lengths[first]
        first += 1
    return micro_steps[first:]
