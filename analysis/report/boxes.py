"""What the timeline of a rank draws as boxes: phases, windows of free memory, and what every iteration has free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.devices import capacity_bytes, main_pool, memory_line
from ebbtide.analysis.metrics.iterations import PHASES, intervals
from ebbtide.analysis.metrics.recurring_windows import by_place
from ebbtide.analysis.metrics.windows import Window, pieces
from ebbtide.analysis.report.columns import UNKNOWN
from ebbtide.analysis.report.lines import Clock
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.analysis.timeseries.thresholds import FreeLine
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, ms_text


@dataclass(frozen=True)
class Boxes:
    """Boxes of one kind. left, right: in the unit of the clock. facts: columns that hovering shows."""

    left: Floats
    right: Floats
    facts: dict[str, Any]


class Choice:
    """Which boxes are drawn where a trace has more than a page can hold: those of one iteration in `step`, so that
    what is drawn looks like the whole; beyond `most`, the longest."""

    def __init__(self, trace: Trace, rank: int, windows: int, guaranteed: int, most: int) -> None:
        self._starts = intervals(trace, rank, device_times=False).spans["start_ns"].to_numpy(np.int64)
        self._most = most
        boxes = max(2 * len(trace.phases(rank)), windows, guaranteed * len(self._starts))
        self.step = -(-boxes // most) if len(self._starts) else 1
        self.left_out = 0

    def __call__(self, starts: Ints, ends: Ints) -> Ints:
        """The places of those to draw, in order of time."""
        iteration = np.searchsorted(self._starts, starts, side="right") - 1
        kept = np.flatnonzero(iteration % self.step == 0)
        longest = kept[np.argsort(-(ends - starts)[kept], kind="stable")[: self._most]]
        self.left_out += len(kept) - len(longest)
        chosen: Ints = longest[np.argsort(starts[longest], kind="stable")]
        return chosen


def phase_boxes(trace: Trace, rank: int, at: Clock, choose: Choice, on_gpu: bool = False) -> dict[str, Boxes]:
    """The phases by name, those of an unfinished iteration too, by the host's times or by the GPU's."""
    rows = trace.phases(rank)
    columns = ["gpu_start_ns", "gpu_end_ns"] if on_gpu else ["start_ns", "end_ns"]
    rows = rows[rows[columns].notna().all(axis=1)]
    rows = rows.iloc[choose(*(rows[column].to_numpy(np.int64) for column in columns))]
    boxes = {}
    for phase in PHASES[:3]:
        of = rows[rows["phase"] == phase]
        starts, ends = (of[column].to_numpy(np.int64) for column in columns)
        facts = {
            "iteration": ["not finished" if pd.isna(number) else str(number) for number in of["iteration"]],
            "micro_step": of["micro_step"].to_numpy(np.int32),
            "ms": ((ends - starts) / 1e6).astype(np.float32),
        }
        boxes[phase] = Boxes(at(starts), at(ends), facts)
    return boxes


# Sub-steps by name, in the colours of the page; others are grey. What is nested in another comes after it.
_OP_COLORS = {
    "reduce": "pool-4",
    "gradient norm": "pool-5",
    "overflow check": "pool-5",
    "clip": "pool-5",
    "prepare": "pool-8",
    "release": "pool-8",
    "gather": "pool-1",
    "unscale": "pool-2",
    "cast": "pool-2",
    "update": "update",
    "parameters": "h2d",
    "upload": "h2d",
    "fetch": "pool-7",
    "gradient up": "pool-4",
    "gradient down": "d2h",
    "flush": "pool-6",
}


def op_boxes(rows: pd.DataFrame, at: Clock, choose: Choice) -> dict[str, Boxes]:
    """Sub-steps (rows of `op_pieces`) by the colour of their names."""
    rows = rows.sort_values("start_ns", kind="stable")
    rows = rows.iloc[choose(*(rows[column].to_numpy(np.int64) for column in ("start_ns", "end_ns")))]
    color = rows["name"].map(_OP_COLORS).fillna("other")
    boxes = {}
    for name in ("other", *dict.fromkeys(_OP_COLORS.values())):
        of = rows[color == name]
        if of.empty:
            continue
        starts, ends = of["start_ns"].to_numpy(np.int64), of["end_ns"].to_numpy(np.int64)
        facts = {
            "op": list(of["name"]),
            "on": list(of["resource"]),
            "subgroup": [UNKNOWN if number < 0 else str(number) for number in of["subgroup"]],
            "bytes": [UNKNOWN if pd.isna(size) else bytes_text(int(size)) for size in of["bytes"]],
            "ms": ((ends - starts) / 1e6).astype(np.float32),
        }
        boxes[name] = Boxes(at(starts), at(ends), facts)
    return boxes


def window_boxes(trace: Trace, rank: int, at: Clock, windows: Sequence[Window], choose: Choice) -> tuple[Boxes, Ints]:
    """(the windows of a rank, their least free bytes)."""
    origins = intervals(trace, rank, device_times=False).spans.set_index("iteration")["start_ns"].to_dict()
    # Without phases windows count from where the memory line begins.
    whole = int(memory_line(trace, rank, main_pool(trace) or "")[0][0]) if windows else 0
    begins = np.array([origins.get(window.iteration, whole) for window in windows], np.int64)
    starts = begins + np.array([round(window.start_ms * 1e6) for window in windows], np.int64)
    ends = begins + np.array([round(window.end_ms * 1e6) for window in windows], np.int64)
    kept = choose(starts, ends)
    shown = [windows[place] for place in kept]
    facts = {
        "phase": [window.phase or "the whole trace" for window in shown],
        "iteration": [UNKNOWN if window.iteration is None else str(window.iteration) for window in shown],
        "span": [f"{ms_text(window.start_ms)} to {ms_text(window.end_ms)}" for window in shown],
        "length": [ms_text(window.end_ms - window.start_ms) for window in shown],
        "free": [bytes_text(window.free_bytes) for window in shown],
        "h2d": [_percent(window.h2d_idle_share) for window in shown],
        "d2h": [_percent(window.d2h_idle_share) for window in shown],
    }
    return Boxes(at(starts[kept]), at(ends[kept]), facts), np.array([w.free_bytes for w in shown], np.int64)


def guaranteed_boxes(trace: Trace, rank: int, at: Clock, min_bytes: int, choose: Choice) -> Boxes:
    """What every iteration has free at the same place, where it lies in each of them. There must be memory, and a
    capacity."""
    times, used = memory_line(trace, rank, main_pool(trace) or "")
    line = FreeLine(times, (capacity_bytes(trace, rank) or 0) - used)
    tables = []
    for place in by_place(pieces(trace, rank, line)):
        lengths = place.ends - place.starts
        for begins, ends, free in place.windows(line, min_bytes):
            columns = {
                "start": place.starts + np.rint(lengths * begins).astype(np.int64),
                "end": place.starts + np.rint(lengths * ends).astype(np.int64),
                "phase": place.phase,
                "free": bytes_text(free),
            }
            tables.append(pd.DataFrame(columns))
    rows = pd.concat(tables, ignore_index=True)
    rows = rows.iloc[choose(rows["start"].to_numpy(np.int64), rows["end"].to_numpy(np.int64))]
    facts = {column: list(rows[column]) for column in ("phase", "free")}
    return Boxes(at(rows["start"].to_numpy(np.int64)), at(rows["end"].to_numpy(np.int64)), facts)


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.0f} %"
