"""Panels of a timeline: lines and stacks of areas of one quantity, and the scale of
their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.timeline.axis import Resolution, TimeAxis
from ebbtide.analysis.timeline.styles import REST, AreaStyle, LineStyle, category_styles
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.units import RATE_UNITS, bytes_unit, ms_text

# (times in ns, values): a value holds from its time until the next one; 0 before the
# first.
StepFunction = tuple[Ints, Ints]


@dataclass(frozen=True)
class StackLayer:
    """One area of a stack: its name, its own value in each step, and its style."""

    name: str
    values: Floats | Ints
    style: AreaStyle


@dataclass(frozen=True)
class TimelineStack:
    """Areas one above the other."""

    edges: Ints  # Start of each step and the end of the last one, ns.
    layers: tuple[StackLayer, ...]  # From the bottom.
    # Length of the slots of a reduced stack; None where every step is drawn.
    slot_ns: float | None = None

    @property
    def borders(self) -> list[Floats]:
        """Bottom of the lowest layer, and the top of each."""
        tops = np.cumsum(
            [layer.values for layer in self.layers], axis=0, dtype=np.float64
        )
        return [np.zeros(len(self.edges) - 1), *tops]


def stack_categories(
    functions: Mapping[str, StepFunction], axis: TimeAxis, resolution: Resolution
) -> TimelineStack | None:
    """Return the stack of the categories with a value above 0 within the axis.

    Return None without one. One with too many steps is reduced to one per slot: the
    categories at the moment of their largest sum, so that no peak is lost and they
    still add up to it. Categories for which there is no style are one layer, REST.
    """
    times, total = _sum(functions)
    first = max(int(np.searchsorted(times, axis.start_ns, side="right")) - 1, 0)
    times, total = times[first:], total[first:]
    inside = times <= axis.end_ns
    times, total = times[inside], total[inside]
    if not len(times):
        return None
    begin, length = (
        max(int(times[0]), axis.start_ns),
        axis.end_ns - max(int(times[0]), axis.start_ns),
    )
    slots = resolution.slots_within(length, axis.length_ns)
    slot_ns = None
    moments, edges = times, np.append(times.clip(begin), axis.end_ns)
    if len(times) > resolution.steps_per_slot * slots:
        edges = begin + np.linspace(0, length, slots + 1).astype(np.int64)
        moments, slot_ns = (
            _peaks(times, total, edges),
            axis.length_ns / resolution.slots,
        )
    values = {
        name: np.append(0, sizes.clip(0))[np.searchsorted(times, moments, side="right")]
        for name, (times, sizes) in functions.items()
    }
    layers = _layers(
        {name: sizes for name, sizes in values.items() if (sizes > 0).any()}
    )
    return TimelineStack(edges, layers, slot_ns) if layers else None


def _sum(functions: Mapping[str, StepFunction]) -> StepFunction:
    times = np.concatenate(
        [np.empty(0, np.int64), *(times for times, _ in functions.values())]
    )
    changes = [np.diff(values.clip(0), prepend=0) for _, values in functions.values()]
    order = np.argsort(times, kind="stable")
    times, total = (
        times[order],
        np.cumsum(np.concatenate([np.empty(0, np.int64), *changes])[order]),
    )
    is_last = np.append(times[1:] > times[:-1], True)[: len(times)]
    return times[is_last], total[is_last]


def _peaks(times: Ints, total: Ints, edges: Ints) -> Ints:
    """Return the moment of each slot at which a step function is largest."""
    starts = edges[:-1]
    at_start = total[np.searchsorted(times, starts, side="right") - 1]
    moments, values = np.append(starts, times), np.append(at_start, total)
    slot = np.searchsorted(starts, moments, side="right") - 1
    order = np.lexsort((moments, -values, slot))
    order = order[slot[order] >= 0]
    is_first: npt.NDArray[np.bool_] = np.append(True, np.diff(slot[order]) > 0)
    return np.asarray(moments[order[is_first]])


def _layers(values: Mapping[str, Ints]) -> tuple[StackLayer, ...]:
    by_size = sorted(values, key=lambda name: (-int(values[name].max()), name))
    styles = category_styles(by_size)
    rest = [name for name in by_size if name not in styles]
    if rest:
        # The smallest layer that has a style becomes a part of the rest.
        smallest = next(name for name in reversed(by_size) if name in styles)
        values = {
            **values,
            REST: np.sum([values[name] for name in (smallest, *rest)], axis=0),
        }
        styles = {
            REST if name == smallest else name: style for name, style in styles.items()
        }
    return tuple(
        StackLayer(name, values[name], style) for name, style in styles.items()
    )


# A level more than this many times above the highest line would press it flat: it is
# off the scale.
_MAX_LEVEL_RATIO = 4.0
# Room above the highest line and above a level.
_LINE_HEADROOM, _LEVEL_HEADROOM = 1.12, 1.08


@dataclass(frozen=True)
class TimelineLine:
    """A step function of one panel."""

    name: str  # Memory pool, or direction of the link.
    # Start of each value and the end of the last one, ns; one more than `values`.
    edges: Ints
    values: Floats | Ints  # Bytes or bytes/s; NaN where unknown.
    style: LineStyle  # Colour, width and dash.
    # Smallest value of each step of a band, whose largest values are in `values`; None
    # for a plain line.
    lowest: Floats | Ints | None = None
    detail: str = ""  # Addition to the name in legends, such as " pinned".
    sign: int = 1  # -1 for a line that is drawn downwards.
    # Times of rates above the link's peak, which are impossible.
    above_peak_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    # Length of the slots of a reduced line; None where every step is drawn.
    slot_ns: float | None = None

    @property
    def label(self) -> str:
        return self.name + self.detail


@dataclass(frozen=True)
class TimelinePanel:
    """Lines of one quantity over time, or boxes and areas, under a name."""

    name: str  # `memory`, `host memory` or `link`; panels of one name share a scale.
    # In drawing order; the lines of a link are of both directions.
    lines: Sequence[TimelineLine] = ()
    # Capacity (bytes) or peak (bytes/s), a line across the panel; None where unknown.
    level: float | None = None
    level_label: str = ""  # Name and value of the level.
    # Pool whose line free memory is above, up to the level; None in panels without free
    # memory.
    free_pool: str | None = None
    # Areas behind the lines; None in panels without.
    stack: TimelineStack | None = None
    on_gpu: bool = False  # Whether its times are the GPU's.

    @property
    def is_empty(self) -> bool:
        return not self.lines and self.stack is None

    def key(self, line: TimelineLine) -> str:
        """Return a name of a line that is unique on a timeline."""
        return f"{self.name}/{line.label}"

    @property
    def is_level_off_scale(self) -> bool:
        """Whether the level is above the end of the axis."""
        return self.level is not None and self.level > self.scale.top

    @property
    def is_link(self) -> bool:
        """Whether values are rates.

        Then h2d is drawn upwards, d2h downwards, so that neither hides the other.
        """
        return self.name == "link"

    @property
    def largest(self) -> float:
        """Largest value that sets the scale.

        Impossible rates above the link's peak do not.
        """
        tops = [] if self.stack is None else [self.stack.borders[-1]]
        values = np.concatenate([[0.0], *(line.values for line in self.lines), *tops])
        values = values[~np.isnan(values)]
        limit = self.level if self.is_link and self.level is not None else np.inf
        return float(values[values <= limit].max())

    @property
    def above_peak_ns(self) -> dict[str, Ints]:
        """Times of rates above the link's peak, by the names of the lines with some."""
        times: dict[str, list[Ints]] = {}
        for line in self.lines:
            times.setdefault(line.name, []).append(line.above_peak_ns)
        merged = {
            name: np.unique(np.concatenate(parts)) for name, parts in times.items()
        }
        return {name: marked for name, marked in merged.items() if len(marked)}

    @property
    def reduction_note(self) -> str | None:
        """Remark on how reduced lines are drawn; None where every step is drawn."""
        slots = [line.slot_ns for line in self.lines if line.slot_ns is not None]
        notes = []
        if slots:
            how = "means" if self.is_link else "smallest to largest"
            notes.append(f"{self.name}: {how} over {ms_text(max(slots) / 1e6)} each")
        if self.stack is not None and self.stack.slot_ns is not None:
            notes.append(
                "categories: at the largest sum in "
                f"{ms_text(self.stack.slot_ns / 1e6)} each"
            )
        return "; ".join(notes) or None

    @cached_property
    def scale(self) -> Scale:
        """Scale of this panel alone."""
        return value_scale(
            self.largest, [] if self.level is None else [self.level], rates=self.is_link
        )


class Scale(NamedTuple):
    """Scale of a panel's values."""

    top: float  # End of the axis, bytes or bytes/s.
    size: float  # Bytes or bytes/s per unit.
    unit: str  # Name of the unit.

    @property
    def units(self) -> float:
        """End of the axis in units."""
        return self.top / self.size


def value_scale(
    largest: float,
    levels: Sequence[float],
    required: Sequence[float] = (),
    rates: bool = False,
) -> Scale:
    """Choose the scale of one panel, or of several that share it.

    Values are bytes, or `rates`, bytes/s.
    """
    top = largest * _LINE_HEADROOM
    limit = _MAX_LEVEL_RATIO * top if top else float("inf")
    shown = [*(level for level in levels if level < limit), *required]
    top = max([top, *(level * _LEVEL_HEADROOM for level in shown)]) or 1.0
    size, unit = (
        next((rate for rate in RATE_UNITS if top >= rate[0]), (1.0, "B/s"))
        if rates
        else bytes_unit(top)
    )
    return Scale(top, size, unit)
