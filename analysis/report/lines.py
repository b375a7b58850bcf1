"""What the timeline of a rank draws: lines of memory and of the link, each panel in one unit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ebbtide.analysis.metrics.devices import capacity_bytes, link_peak, main_device, main_pool, memory_line
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, Traffic, copies, traffic
from ebbtide.analysis.timeseries.step_functions import Floats, Ints, thinned
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, bytes_unit, rate_text

# A capacity more than this many times above the highest line would press all lines flat: it is off the scale then.
_MOST_ABOVE = 8.0
# More points than these a line does not need on any screen, at a few zooms.
_MOST_POINTS = 16_000
# In this order pools are drawn and named; others follow by their names.
_POOLS = ("device", "reserved", "allocated", "requested", "tensors", "heap", "rss", "host", "pinned", "swap")
# The style sheet has so many colours for pools that it does not know by name.
_MORE_COLORS = 8
# Lines that lie near each other differ by more than colour.
_DASHES = {"reserved": "dashed", "requested": "dotted", "rss": "dashed", "pinned": "dotted"}


@dataclass(frozen=True)
class Clock:
    """The time axis: 0 is where the first iteration begins, or what is recorded. first, last: of all that was
    recorded, ns. shown: what the page shows at first, ns. unit: `s` or `ms`."""

    origin: int
    first: int
    last: int
    shown: tuple[int, int]
    unit: str

    def __call__(self, times: Ints) -> Floats:
        return np.asarray((times - self.origin) / (1e9 if self.unit == "s" else 1e6))


@dataclass(frozen=True)
class Line:
    """A step function: x in the unit of the clock, y in that of its panel; a value holds until the next one. color: a
    CSS variable's name."""

    name: str
    x: Floats
    y: Floats
    color: str

    @property
    def dash(self) -> str:
        return _DASHES.get(self.name, "solid")


@dataclass(frozen=True)
class Panel:
    """Lines of one unit. level: a line across, the capacity or the peak, and what it is. scale: bytes, or
    bytes/s, in one unit. top: where the y axis ends. free_above: the line above which memory is free, up to level."""

    name: str
    unit: str
    scale: float
    lines: tuple[Line, ...]
    level: float | None
    level_text: str
    top: float
    notes: tuple[str, ...] = ()
    free_above: str | None = None

    @property
    def level_is_off(self) -> bool:
        return self.level is not None and self.level > self.top


def clock(trace: Trace, rank: int) -> Clock | None:
    """None where a rank has neither phases nor memory nor link."""
    ends = [
        (int(table[start].min()), int(table[end].max()))
        for table, start, end in (
            (trace.phases(rank), "start_ns", "end_ns"),
            (trace.memory(rank), "t_ns", "t_ns"),
            (trace.link(rank), "t_ns", "t_ns"),
            (trace.transfers(rank), "start_ns", "end_ns"),
        )
        if len(table)
    ]
    if not ends:
        return None
    first, last = min(start for start, _ in ends), max(end for _, end in ends)
    last = max(last, first + 1)
    spans = intervals(trace, rank, device_times=False).spans
    shown = first, last
    if len(spans):
        shown = int(spans["start_ns"].min()), int(spans["end_ns"].max())
    return Clock(shown[0], first, last, shown, "s" if last - first >= 2e9 else "ms")


def panels(trace: Trace, rank: int, at: Clock, most: int) -> list[Panel]:
    """Those that something was recorded for: the memory of the rank's device, that of the host, the link.

    most: points of all lines together.
    """
    drawn = {str(pool): memory_line(trace, rank, str(pool)) for pool in trace.memory(rank)["pool"].unique()}
    drawn = {pool: drawn[pool] for pool in sorted(drawn, key=_order) if drawn[pool][1].any()}
    device = main_device(trace, rank)
    most = min(most // (len(drawn) + len(DIRECTIONS)), _MOST_POINTS)
    rows = trace.memory(rank)
    on_host = {str(pool) for pool in rows.loc[rows["device"] == "cpu", "pool"].unique()} if device != "cpu" else set()
    card = _memory(
        "memory", {p: v for p, v in drawn.items() if p not in on_host}, capacity_bytes(trace, rank), at, most
    )
    host = _memory("host memory", {p: v for p, v in drawn.items() if p in on_host}, None, at, most)
    if card is not None and card.level is not None:
        card = replace(card, free_above=main_pool(trace))
    return [panel for panel in (card, host, _link(trace, rank, at, most)) if panel is not None]


def _order(pool: str) -> tuple[int, str]:
    return _POOLS.index(pool) if pool in _POOLS else len(_POOLS), pool


def _memory(name: str, lines: dict[str, tuple[Ints, Ints]], capacity: int | None, at: Clock, most: int) -> Panel | None:
    if not lines:
        return None
    largest = float(max(int(sizes.max()) for _, sizes in lines.values()))
    scale, unit = bytes_unit(largest)
    top = largest * 1.1
    if capacity is not None and capacity < _MOST_ABOVE * top:
        top = max(top, capacity * 1.05)
    notes = []
    if any(len(times) > most for times, _ in lines.values()):
        notes.append(
            f"{name}: lines of more than {most:,} samples are drawn by the smallest and the largest of each stretch "
            "(ebbtide plot --iterations draws a part of them in full)"
        )
    others = [pool for pool in lines if pool not in _POOLS]
    colors = {pool: f"pool-{place % _MORE_COLORS + 1}" for place, pool in enumerate(others)}
    colors |= {pool: pool for pool in _POOLS}
    drawn = []
    for pool, line in lines.items():
        times, sizes = thinned(*line, most)
        drawn.append(Line(pool, at(np.append(times, at.last)), np.append(sizes, sizes[-1]) / scale, colors[pool]))
    level = capacity / scale if capacity is not None else None
    return Panel(name, unit, scale, tuple(drawn), level, f"capacity {bytes_text(capacity)}", top / scale, tuple(notes))


def _link(trace: Trace, rank: int, at: Clock, most: int) -> Panel | None:
    edges, slots = _edges(trace, rank, at, most)
    lines, notes = [], []
    for way in DIRECTIONS:
        moved = traffic(trace, rank, way)
        if moved is None or len(edges) < 2:
            continue
        rates = _rates(moved, edges)
        lines.append(Line(way, at(edges), np.append(rates, rates[-1]), way))
        if moved.false_samples:
            notes.append(f"samples of {way} above the link's peak are left out: {moved.false_samples:,}")
    if not lines:
        return None
    if slots:
        notes.append(f"link: mean rates over {(edges[1] - edges[0]) / 1e6:,.3g} ms each")
    largest = float(max(np.nanmax(line.y, initial=0.0) for line in lines))
    peak = link_peak(trace, rank)
    level = peak / 1e9 if peak is not None else None
    top = largest * 1.1 or 1.0
    if level is not None and level < _MOST_ABOVE * top:
        top = max(top, level * 1.08)
    return Panel("link", "GB/s", 1e9, tuple(lines), level, f"peak {rate_text(peak)}", top, tuple(notes))


def _edges(trace: Trace, rank: int, at: Clock, most: int) -> tuple[Ints, bool]:
    """(the times between which the link's rates are drawn, whether they are slots of one length): every change where
    those are at most `most`. Mean rates in slots keep what thinning to extremes would not: bytes are area."""
    if trace.rank(rank).get("transfers_recorded"):
        rows = copies(trace, rank, None)
        edges = np.union1d(rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64))
        # All copies are known, so before the first and after the last there is none.
        edges = np.union1d(edges, [at.first, at.last])
    else:
        rows = trace.link(rank)
        rows = rows[rows["device"] == main_device(trace, rank)]
        times = rows["t_ns"].to_numpy(np.int64)
        edges = np.union1d(times, times[:1] - rows["window_ns"].to_numpy(np.int64)[:1])
    if len(edges) <= most:
        return edges, False
    return np.unique(np.linspace(edges[0], edges[-1], most).astype(np.int64)), True


def _rates(moved: Traffic, edges: Ints) -> Floats:
    """GB/s (bytes per ns) between the edges; NaN where too little was sampled."""
    return moved.bytes(edges[:-1], edges[1:]) / np.diff(edges)
