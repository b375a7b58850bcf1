"""The use of a link as step functions: of copies, or of sampled counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.devices import link_peak, main_device
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, Traffic, copies, of_copies, traffic
from ebbtide.analysis.plot.styles import HOST_MEMORY_DASHES, Dashes
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeseries.step_functions import Floats, Ints

# More steps than these are drawn as their means over so many slots: extremes alone would fill the panel.
_MOST_STEPS = 4000
SLOTS = 1000


@dataclass(frozen=True)
class LinkLine:
    """A step function. direction: h2d or d2h. edges: ns, one more than rates (bytes/s); NaN where nothing is known.
    above: times (ns) of rates beyond the link's peak, which cannot be. slots: whether rates are means over slots.
    detail: what the legend says beside the direction. dashes: unlike where kinds of host memory are told apart."""

    direction: str
    edges: Ints
    rates: Floats
    above: Ints
    slots: bool
    detail: str = ""
    dashes: Dashes = "solid"


def link_lines(view: View) -> list[LinkLine]:
    """Empty where neither copies nor counters were recorded."""
    recorded = bool(view.trace.rank(view.rank).get("transfers_recorded"))
    return [line for way in DIRECTIONS for line in (_of_copies(view, way) if recorded else _of_counters(view, way))]


def _of_copies(view: View, direction: str) -> list[LinkLine]:
    """A line for each kind of host memory that occurs."""
    rows = copies(view.trace, view.rank, direction)
    *told, not_told = HOST_MEMORY_DASHES
    kinds = rows["host_memory"].where(rows["host_memory"].isin(told), not_told)
    names = [kind for kind in HOST_MEMORY_DASHES if (kinds == kind).any()]
    if len(names) > 1:
        return [_copied(view, direction, rows[kinds == kind], f" {kind}", HOST_MEMORY_DASHES[kind]) for kind in names]
    return [_copied(view, direction, rows, "".join(f" {kind}" for kind in names if kind in told), "solid")]


def _copied(view: View, direction: str, rows: pd.DataFrame, detail: str, dashes: Dashes) -> LinkLine:
    edges, slots = _edges(view, rows)
    rates = _means(of_copies(rows), edges)
    if np.isnan(rates).all():
        detail += ", sizes not known"
    peak = link_peak(view.trace, view.rank) or np.inf
    middles = edges[:-1] + np.diff(edges) // 2
    return LinkLine(direction, edges, rates, middles[rates > peak], slots, detail, dashes)


def _edges(view: View, rows: pd.DataFrame) -> tuple[Ints, bool]:
    """(the times at which the rate of copies changes, False), or (the edges of the slots, True)."""
    starts, ends = rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)
    shown = view.inside(starts, ends)
    bounds = np.array([view.start, view.end], np.int64)
    edges = np.unique(np.concatenate([bounds, starts[shown], ends[shown]]).clip(view.start, view.end))
    # The rate of a copy that takes no time is not known, but that of a slot is.
    if len(edges) > _MOST_STEPS or (starts[shown] == ends[shown]).any():
        return _slots(view), True
    return edges, False


def _of_counters(view: View, direction: str) -> list[LinkLine]:
    """Of samples: each stands for the time that analysis.traffic gives it, and where that is none there is a gap."""
    moved = traffic(view.trace, view.rank, direction)
    if moved is None or moved.covered is None:
        return []
    rows = view.trace.link(view.rank)
    rows = rows[rows["device"] == main_device(view.trace, view.rank)]
    times = rows["t_ns"].to_numpy(np.int64)
    rates = rows[f"{direction}_bytes_per_s"].to_numpy(np.float64)
    known = np.diff(moved.covered(times), prepend=0.0).astype(np.int64)
    shown = (times > view.start) & (times - known < view.end)
    false = (known == 0) & (rates > (link_peak(view.trace, view.rank) or np.inf))
    above = times[shown & (times <= view.end) & false]
    if shown.sum() > _MOST_STEPS:
        edges = _slots(view)
        return [LinkLine(direction, edges, _means(moved, edges), above, slots=True)]
    edges, steps = _steps(view, times[shown], known[shown], rates[shown])
    return [LinkLine(direction, edges, steps, above, slots=False)]


def _steps(view: View, times: Ints, known: Ints, rates: Floats) -> tuple[Ints, Floats]:
    """(edges ns, rates) of samples that hold for `known` ns before their times, with NaN between them."""
    edges = np.stack([times - known, times], axis=1).ravel().clip(view.start, view.end)
    values = np.stack([rates, np.full(len(rates), np.nan)], axis=1).ravel()[:-1]
    lasting = np.diff(edges) > 0
    if not lasting.any():
        return np.array([view.start, view.end], np.int64), np.full(1, np.nan)
    return np.append(edges[:1], edges[1:][lasting]), values[lasting]


def _slots(view: View) -> Ints:
    return np.unique(view.start + np.linspace(0, view.end - view.start, SLOTS + 1).astype(np.int64))


def _means(moved: Traffic, edges: Ints) -> Floats:
    """Mean bytes/s between edges, of the time in which it is known; NaN where that is none."""
    sizes = np.diff(moved.total(edges))
    lengths = np.diff(edges).astype(np.float64) if moved.covered is None else np.diff(moved.covered(edges))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(lengths > 0, sizes / lengths * 1e9, np.nan))
