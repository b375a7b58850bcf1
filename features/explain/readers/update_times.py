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
    update_s: float

    @property
    def title(self) -> str:
        return f"times of {counted(self.steps, 'update')} by DeepSpeed's timers"


@reader
def read_update_times(text: PastedText) -> Iterator[UpdateTimes]:
    rows: list[tuple[float, float]] = []
    numbers: list[int] = []
    for line in text.lines:
        times = dict(_TIME.findall(line.text)) if "time (ms)" in line.text else {}
        if "step" in times and len(times) == 3:
            figures = [float(time) / 1000 for time in times.values()]
            rows.append((sum(figures), float(times["step"]) / 1000))
            numbers.append(line.number)
    if rows:
        steps_s, updates_s = zip(*rows, strict=True)
        place = Place(text_name=text.name, first_line=numbers[0], last_line=numbers[-1])
        yield UpdateTimes(
            place=place,
            steps=len(rows),
            step_s=median(steps_s),
            update_s=median(updates_s),
        )
