"""Reads the times of updates that DeepSpeed's `wall_clock_breakdown` prints."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from ebbtide.features.explain.pasted import PastedText
from ebbtide.features.explain.record import Place, Record, reader
from ebbtide.units import counted

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


@reader
def read_update_times(text: PastedText) -> Iterator[UpdateTimes]:
    rows: list[list[float]] = []
    numbers: list[int] = []
    for line, following in zip(text.lines, (*text.lines[1:], None), strict=True):
        if "time (ms)" not in line.text:
            continue
        # A terminal that was copied may have cut the line.
        is_cut = following is not None and "time (ms)" not in following.text
        rest = following.text if following is not None and is_cut else ""
        times = dict(_TIME.findall(line.text + rest))
        if "step" in times and len(times) == 3:
            figures = [float(time) / 1000 for time in times.values()]
            rows.append([sum(figures), *figures])
            numbers.append(line.number)
    if rows:
        columns = [median(column) for column in zip(*rows, strict=True)]
        step_s, forward_s, backward_s, update_s = columns
        place = Place(text_name=text.name, first_line=numbers[0], last_line=numbers[-1])
        yield UpdateTimes(
            place=place,
            steps=len(rows),
            step_s=step_s,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
        )
