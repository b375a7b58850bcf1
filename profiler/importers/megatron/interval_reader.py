"""Reads what a Megatron-LM log prints every `--log-interval` iterations: time per iteration, and timers."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from ebbtide.profiler.importers.text_log import LogLine

# With underscores in Megatron-DeepSpeed of Argonne. One decimal: a line that was cut within the number has no ` |`.
_ITERATION = re.compile(
    r"\biteration[= ]\s{0,20}(\d{1,12})/\s{0,20}\d{1,12} \|.{0,2000}?"
    r"\belapsed[ _]time[ _]per[ _]iteration(?: \(ms\): |_ms=)\s{0,20}(\d{1,9}\.\d{1,6}) ?\|"
)
# The time of the line, which has no fraction of a second.
_STAMP = re.compile(r"\[(20\d\d-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)\]")
# Timers: mean per iteration since the line before. `--timing-log-option` is minmax, max or all.
_HEADER = re.compile(r"\btimes? across ranks \(ms\):")
_TIMER = re.compile(
    r"(?:^|\s)([a-z][\w/-]{0,63}) \.{0,64}: (?:\((?:\d{1,9}\.\d\d), (\d{1,9}\.\d\d)\)|(\d{1,9}\.\d\d)(?!\S))"
)
_NAME = re.compile(r"(?:^|\s)([a-z][\w/-]{0,63}):\s*$")
_RANK = re.compile(r"(?:^|\s)rank\s{1,8}(\d{1,7}): (\d{1,9}\.\d\d)(?!\S)")
# Timers of old versions, on one line: `time (ms) | forward: 12.34 | backward: 23.45`.
_OLD_HEADER = "time (ms) |"
_OLD_TIMER = re.compile(r"\|\s([a-z][\w -]{0,63}): (\d{1,9}\.\d\d)(?!\d)")
_LOG_INTERVAL = re.compile(r"\blog_interval \.{3,64} (\d{1,7})\b")
# A line with a gap of more is of another run, which was appended.
_MAX_INTERVAL = 100_000


@dataclass
class LoggedInterval:
    """The iterations since the line before, of which the log has means.

    Attributes:
        last_iteration: Number of the last of them, from 1.
        iteration_ms: Mean time of an iteration.
        t_ns: Time of the line as if the log's clock were UTC; None if the line has no time.
        timers: Mean ms per iteration, by name and rank. The rank is None for the maximum over ranks.
        count: Number of iterations.
    """

    last_iteration: int
    iteration_ms: float
    t_ns: int | None
    timers: dict[str, dict[int | None, float]] = field(default_factory=dict)
    count: int = 1

    def timer_ms(self, rank: int, *names: str) -> float | None:
        """Return the first of some timers that the log has, of a rank or as the maximum over ranks; None for none."""
        for name in names:
            of_ranks = self.timers.get(name)
            if of_ranks:
                return of_ranks.get(rank, of_ranks.get(None))
        return None


class IntervalReader:
    """Collects the intervals line by line.

    Attributes:
        intervals: The intervals so far, without their `count`.
    """

    def __init__(self) -> None:
        self.intervals: list[LoggedInterval] = []
        self._log_interval: int | None = None
        self._in_timers = False
        self._name = ""

    def feed(self, line: LogLine) -> None:
        """Read one line."""
        text = line.text
        if "iteration" in text and (match := _ITERATION.search(text)):
            t_ns = line.t_ns if line.t_ns is not None else _stamp_ns(text)
            self.intervals.append(LoggedInterval(int(match.group(1)), float(match.group(2)), t_ns))
            self._in_timers = False
        elif "across ranks (ms)" in text and (header := _HEADER.search(text)):
            self._in_timers, self._name = True, ""
            self._add_timers(text[header.end() :])
        elif _OLD_HEADER in text and self.intervals:
            for name, ms in _OLD_TIMER.findall(text):
                self.intervals[-1].timers.setdefault(name, {})[None] = float(ms)
        elif self._in_timers:
            self._add_timers(text)
        elif self._log_interval is None and "log_interval" in text and (match := _LOG_INTERVAL.search(text)):
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
            timers.setdefault(self._name, {}).setdefault(int(match.group(1)), float(match.group(2)))
        elif match := _NAME.search(text):
            self._name = match.group(1)
        elif text.strip():
            self._in_timers = False

    def finish(self) -> bool:
        """Leave out a last interval that was cut off, and derive how many iterations each interval has.

        Usually they are as many as the numbers of two lines differ.

        Returns:
            Whether an interval was left out, because it lacks timers that the one before has.
        """
        cut = len(self.intervals) > 1 and self.intervals[-1].timers.keys() < self.intervals[-2].timers.keys()
        if cut:
            self.intervals.pop()
        differences = [after.last_iteration - before.last_iteration for before, after in pairwise(self.intervals)]
        differences = [d if 0 < d <= _MAX_INTERVAL else 0 for d in differences]
        usual = Counter(d for d in differences if d).most_common(1)
        interval = usual[0][0] if usual else min(self._log_interval or 1, _MAX_INTERVAL)
        for logged, difference in zip(self.intervals, [0, *differences], strict=False):
            # The first line, also of a run that was appended, covers a whole interval, or all iterations so far.
            logged.count = max(1, min(interval, difference or logged.last_iteration))
        return cut


def is_iteration(text: str) -> bool:
    """Return whether a line of a log is one that Megatron prints for its iterations."""
    return "iteration" in text and _ITERATION.search(text) is not None


def _stamp_ns(text: str) -> int | None:
    match = _STAMP.search(text)
    if match is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(f"{match.group(1)}T{match.group(2)}+00:00")
    except ValueError:
        return None
    return int(moment.timestamp()) * 1_000_000_000
