"""The link panel of a timeline: rates of copies, or of sampled counters, as step
functions."""

import numpy as np

from ebbtide.analysis.metrics.devices import link_peak, main_device
from ebbtide.analysis.metrics.link_throughput import (
    DIRECTIONS,
    Copies,
    Traffic,
    copies,
    of_copies,
    traffic,
)
from ebbtide.analysis.timeline.axis import Resolution, TimeAxis
from ebbtide.analysis.timeline.panels import TimelineLine, TimelinePanel
from ebbtide.analysis.timeline.styles import (
    HOST_MEMORY_DASHES,
    SOLID,
    UNKNOWN_HOST_MEMORY,
    Dash,
    link_style,
)
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.profiler.trace import Trace
from ebbtide.units import NOT_KNOWN, rate_text


def link_panel(
    trace: Trace, rank: int, axis: TimeAxis, resolution: Resolution
) -> TimelinePanel | None:
    """Return the panel of a rank's link.

    Return None where neither copies nor counters were recorded.
    """
    builder = _LineBuilder(trace, rank, axis, resolution)
    lines = [line for direction in DIRECTIONS for line in builder.lines(direction)]
    peak = link_peak(trace, rank)
    label = "" if peak is None else f"peak {rate_text(peak)}"
    return TimelinePanel("link", lines, peak, label, on_gpu=True) if lines else None


# Of each direction: h2d is drawn upwards, d2h downwards.
_SIGNS = {"h2d": 1, "d2h": -1}


class _LineBuilder:
    """Builds the lines of one rank's link."""

    def __init__(
        self, trace: Trace, rank: int, axis: TimeAxis, resolution: Resolution
    ) -> None:
        self._trace = trace
        self._rank = rank
        self._axis = axis
        self._peak = link_peak(trace, rank) or np.inf
        length = axis.end_ns - axis.start_ns
        slots = resolution.slots_within(length, axis.length_ns)
        self._max_steps = resolution.steps_per_slot * slots
        self._slot_ns = axis.length_ns / resolution.slots
        self._slot_edges = np.unique(
            axis.start_ns + np.linspace(0, length, slots + 1).astype(np.int64)
        )

    def lines(self, direction: str) -> list[TimelineLine]:
        if self._trace.rank(self._rank).transfers_recorded:
            return self._lines_of_copies(direction)
        return self._lines_of_counters(direction)

    def _lines_of_copies(self, direction: str) -> list[TimelineLine]:
        """Build a line for each kind of host memory that occurs."""
        rows = copies(self._trace, self._rank, direction)
        kinds = np.where(
            np.isin(rows.host_memory, list(HOST_MEMORY_DASHES)),
            rows.host_memory,
            UNKNOWN_HOST_MEMORY,
        )
        names = [kind for kind in HOST_MEMORY_DASHES if (kinds == kind).any()]
        if len(names) > 1:
            return [
                self._line_of_copies(
                    direction,
                    rows.only(kinds == kind),
                    f" {kind}",
                    HOST_MEMORY_DASHES[kind],
                )
                for kind in names
            ]
        detail = "".join(f" {kind}" for kind in names if kind != UNKNOWN_HOST_MEMORY)
        return [self._line_of_copies(direction, rows, detail, SOLID)]

    def _line_of_copies(
        self, direction: str, rows: Copies, detail: str, dash: Dash
    ) -> TimelineLine:
        starts, ends = rows.starts, rows.ends
        shown = self._axis.overlaps(starts, ends)
        bounds = np.array([self._axis.start_ns, self._axis.end_ns], np.int64)
        edges = np.unique(
            np.concatenate([bounds, starts[shown], ends[shown]]).clip(
                self._axis.start_ns, self._axis.end_ns
            )
        )
        # The rate of a copy that takes no time is unknown, but the rate of a slot is
        # known.
        is_reduced = len(edges) > self._max_steps or bool(
            (starts[shown] == ends[shown]).any()
        )
        edges = self._slot_edges if is_reduced else edges
        rates = _mean_rates(
            of_copies(rows, self._trace.rank(self._rank).transfers_spans_ns), edges
        )
        if len(starts) and np.isnan(rows.bytes).all():
            detail += f", sizes {NOT_KNOWN}"
        middles = edges[:-1] + np.diff(edges) // 2
        return TimelineLine(
            direction,
            edges,
            rates,
            link_style(direction, dash),
            detail=detail,
            sign=_SIGNS[direction],
            above_peak_ns=middles[rates > self._peak],
            slot_ns=self._slot_ns if is_reduced else None,
        )

    def _lines_of_counters(self, direction: str) -> list[TimelineLine]:
        """Build the line of samples, with gaps between them.

        Each covers the time that link_throughput gives it.
        """
        moved = traffic(self._trace, self._rank, direction)
        if moved is None or moved.covered is None:
            return []
        rows = self._trace.link(self._rank)
        rows = rows[rows["device"] == main_device(self._trace, self._rank)]
        times = rows["t_ns"].to_numpy(np.int64)
        rates = rows[f"{direction}_bytes_per_s"].to_numpy(np.float64)
        covered_ns = np.diff(moved.covered(times), prepend=0.0).astype(np.int64)
        shown = (times > self._axis.start_ns) & (times - covered_ns < self._axis.end_ns)
        is_rejected = (covered_ns == 0) & (rates > self._peak)
        above_peak = times[shown & (times <= self._axis.end_ns) & is_rejected]
        is_reduced = int(shown.sum()) > self._max_steps
        if is_reduced:
            edges, values = self._slot_edges, _mean_rates(moved, self._slot_edges)
        else:
            edges, values = self._sample_steps(
                times[shown], covered_ns[shown], rates[shown]
            )
        return [
            TimelineLine(
                direction,
                edges,
                values,
                link_style(direction, SOLID),
                sign=_SIGNS[direction],
                above_peak_ns=above_peak,
                slot_ns=self._slot_ns if is_reduced else None,
            )
        ]

    def _sample_steps(
        self, times: Ints, covered_ns: Ints, rates: Floats
    ) -> tuple[Ints, Floats]:
        """Return (edges ns, rates) of samples that cover `covered_ns` before their
        times, with NaN between them."""
        start, end = self._axis.start_ns, self._axis.end_ns
        edges = np.stack([times - covered_ns, times], axis=1).ravel().clip(start, end)
        values = np.stack([rates, np.full(len(rates), np.nan)], axis=1).ravel()[:-1]
        has_length = np.diff(edges) > 0
        if not has_length.any():
            return np.array([start, end], np.int64), np.full(1, np.nan)
        return np.append(edges[:1], edges[1:][has_length]), values[has_length]


def _mean_rates(moved: Traffic, edges: Ints) -> Floats:
    """Return mean bytes/s between edges over the time with a known rate; NaN where
    there is none."""
    sizes = np.diff(moved.total(edges))
    lengths = (
        np.diff(edges).astype(np.float64)
        if moved.covered is None
        else np.diff(moved.covered(edges))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(lengths > 0, sizes / lengths * 1e9, np.nan))
