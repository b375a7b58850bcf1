"""Reads the times of updates that DeepSpeed's `wall_clock_breakdown` prints."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

from ebbtide.features.explain.pasted import PastedText
from ebbtide.features.explain.record import Place, Record, reader
from ebbtide.units import counted

_OTHER_RUN = 1.2
# A line that a person wrote, or the end of what was quoted.
_WORDS = re.compile(r"^(?:```|[A-Z][^|=\[\]{}]{12,}$)")
# `_start_timers` and `log` in deepspeed/runtime/engine.py and utils/timer.py, 0.3 to
# 0.19.
_TIME = re.compile(r"\b(fwd|forward|bwd|backward|step): (\d{1,9}(?:\.\d{1,6})?)\b")


@dataclass(frozen=True, kw_only=True)
class UpdateTimes(Record):
    """Times of forward, backward and update of a step in s: medians of all steps."""

    steps: int
    step_s: float
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def title(self) -> str:
        return f"times of {counted(self.steps, 'update')} by DeepSpeed's timers"


@dataclass
class _Run:
    """Steps without words between them; each has the time of all, and of its parts."""

    rows: list[list[float]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def medians(self) -> list[float]:
        return [median(column) for column in zip(*self.rows, strict=True)]


@reader
def read_update_times(text: PastedText) -> Iterator[UpdateTimes]:
    runs = [_Run()]
    for line, following in zip_longest(text.lines, text.lines[1:]):
        if "time (ms)" not in line.text:
            if _WORDS.match(line.text) and runs[-1].rows:
                runs.append(_Run())
            continue
        # A terminal that was copied may have cut the line.
        is_cut = following is not None and "time (ms)" not in following.text
        rest = following.text if following is not None and is_cut else ""
        times = dict(_TIME.findall(line.text + rest))
        if "step" in times and len(times) == 3:
            figures = [float(time) / 1000 for time in times.values()]
            runs[-1].rows.append([sum(figures), *figures])
            runs[-1].numbers.append(line.number)
    for run in _joined([run for run in runs if run.rows]):
        step_s, forward_s, backward_s, update_s = run.medians()
        yield UpdateTimes(
            place=Place(
                text_name=text.name,
                first_line=run.numbers[0],
                last_line=run.numbers[-1],
            ),
            steps=len(run.rows),
            step_s=step_s,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
        )


def _joined(runs: list[_Run]) -> list[_Run]:
    """Join runs that are as fast as the one before: a log has words in it, too."""
    joined: list[_Run] = []
    for run in runs:
        if joined:
            before_s, after_s = joined[-1].medians()[0], run.medians()[0]
            if max(before_s, after_s) < _OTHER_RUN * min(before_s, after_s):
                joined[-1].rows += run.rows
                joined[-1].numbers += run.numbers
                continue
        joined.append(run)
    return joined
