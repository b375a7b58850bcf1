"""The boxes of a timeline by colour, with the columns that hovering shows, and the templates of their tooltips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.tables.table import NOT_KNOWN
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.styles import OTHER_SUBSTEP, SUBSTEP_COLORS
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.phases import PHASES
from ebbtide.units import bytes_text, ms_text


@dataclass(frozen=True)
class ChartBoxes:
    """Boxes of one colour."""

    left: Floats  # Left edges in the unit of the time axis.
    right: Floats  # Right edges.
    columns: dict[str, Any]  # Values per box for the tooltip, by name.


def phase_chart_boxes(rows: pd.DataFrame, axis: TimeAxis) -> dict[str, ChartBoxes]:
    """Return boxes of phases (`phase_boxes`) by the name of the phase, which is that of the colour too."""
    by_phase = {}
    for phase in PHASES:
        boxes = rows[rows["phase"] == phase]
        columns = {
            "iteration": ["not finished" if pd.isna(number) else str(number) for number in boxes["iteration"]],
            "micro_step": boxes["micro_step"].to_numpy(np.int32),
            "ms": _lengths_ms(boxes),
        }
        by_phase[phase] = _chart_boxes(boxes, axis, columns)
    return by_phase


def substep_chart_boxes(rows: pd.DataFrame, axis: TimeAxis) -> dict[str, ChartBoxes]:
    """Return boxes of sub-steps (`substep_lanes`) by colour; a nested one is drawn after the one around it."""
    color = rows["name"].map(SUBSTEP_COLORS).fillna(OTHER_SUBSTEP)
    by_color = {}
    for name in (OTHER_SUBSTEP, *dict.fromkeys(SUBSTEP_COLORS.values())):
        boxes = rows[color == name]
        if boxes.empty:
            continue
        columns = {
            "op": list(boxes["name"]),
            "on": list(boxes["resource"]),
            "subgroup": [NOT_KNOWN if number < 0 else str(number) for number in boxes["subgroup"]],
            "bytes": [NOT_KNOWN if pd.isna(size) else bytes_text(int(size)) for size in boxes["bytes"]],
            "ms": _lengths_ms(boxes),
        }
        by_color[name] = _chart_boxes(boxes, axis, columns)
    return by_color


def window_chart_boxes(rows: pd.DataFrame, axis: TimeAxis, level: float, size: float) -> ChartBoxes:
    """Return boxes of windows (`window_boxes`), each from the peak of its memory (column `bottom`) up to the level, in
    the unit of the panel; `size` is the bytes per unit."""
    columns = {
        "bottom": (level - rows["free_bytes"].to_numpy() / size).astype(np.float32),
        "phase": [phase or "the whole trace" for phase in rows["phase"]],
        "iteration": [NOT_KNOWN if pd.isna(number) else str(int(number)) for number in rows["iteration"]],
        "span": [f"{ms_text(s)} to {ms_text(e)}" for s, e in zip(rows["start_ms"], rows["end_ms"], strict=True)],
        "length": [ms_text(length) for length in rows["end_ms"] - rows["start_ms"]],
        "free": [bytes_text(int(free_bytes)) for free_bytes in rows["free_bytes"]],
        "h2d": [_percent(share) for share in rows["h2d_idle_share"]],
        "d2h": [_percent(share) for share in rows["d2h_idle_share"]],
    }
    return _chart_boxes(rows, axis, columns)


def recurring_chart_boxes(rows: pd.DataFrame, axis: TimeAxis) -> ChartBoxes:
    """Return boxes of windows that every iteration has (`recurring_boxes`)."""
    columns = {
        "phase": list(rows["phase"]),
        "free": [bytes_text(int(free_bytes)) for free_bytes in rows["free_bytes"]],
    }
    return _chart_boxes(rows, axis, columns)


def _chart_boxes(rows: pd.DataFrame, axis: TimeAxis, columns: dict[str, Any]) -> ChartBoxes:
    left, right = (axis.x(rows[column].to_numpy(np.int64)) for column in ("start_ns", "end_ns"))
    return ChartBoxes(left, right, columns)


def _lengths_ms(rows: pd.DataFrame) -> Floats:
    return np.asarray((rows["end_ns"] - rows["start_ns"]).to_numpy(np.int64) / 1e6, np.float32)


def _percent(share: float) -> str:
    return "unknown" if np.isnan(share) else f"{100 * share:.0f} %"


def _tooltip(title: str, **rows: str) -> str:
    lines = "".join(
        f'<div style="color:var(--muted)">{label}</div><div style="text-align:right">{text}</div>'
        for label, text in rows.items()
    )
    grid = f'<div style="display:grid;grid-template-columns:auto auto;column-gap:14px">{lines}</div>'
    return f'<div style="font-weight:600">{title}</div>{grid}'


PHASE_TOOLTIP = _tooltip(
    "$name", **{"iteration": "@iteration", "micro-step": "@micro_step", "length": "@ms{0,0.00} ms"}
)
SUBSTEP_TOOLTIP = _tooltip("@op", on="@on", subgroup="@subgroup", bytes="@bytes", length="@ms{0,0.00} ms")
RECURRING_TOOLTIP = _tooltip("free in every iteration", **{"phase": "@phase", "at least": "@free"})
WINDOW_TOOLTIP = _tooltip(
    "window: @phase",
    **{
        "iteration": "@iteration",
        "within it": "@span",
        "length": "@length",
        "least free": "@free",
        "h2d idle": "@h2d",
        "d2h idle": "@d2h",
    },
)
