"""Stacks of areas: step functions of one unit, one above the other, whose top is their sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.reduction import Resolution
from ebbtide.analysis.timeline.styles import REST, AreaStyle, category_styles
from ebbtide.analysis.timeseries.step_functions import Floats, Ints

# (times in ns, values): a value holds from its time until the next one; 0 before the first.
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
    slot_ns: float | None = None  # Length of the slots of a reduced stack; None where every step is drawn.

    @property
    def borders(self) -> list[Floats]:
        """Bottom of the lowest layer, and the top of each."""
        tops = np.cumsum([layer.values for layer in self.layers], axis=0, dtype=np.float64)
        return [np.zeros(len(self.edges) - 1), *tops]


def stack_categories(
    functions: Mapping[str, StepFunction], axis: TimeAxis, resolution: Resolution
) -> TimelineStack | None:
    """Return the stack of some categories within the axis; categories without a value above 0 in it are left out.

    A stack with too many steps is reduced to one per slot: the categories at the moment of the slot at which their sum
    is largest, so that no peak is lost and the layers still add up to it. Categories for which there is no style are
    one layer, REST. The result is None where no category has a value above 0.
    """
    times, total = _sum(functions)
    first = max(int(np.searchsorted(times, axis.start_ns, side="right")) - 1, 0)
    times, total = times[first:], total[first:]
    inside = times <= axis.end_ns
    times, total = times[inside], total[inside]
    if not len(times):
        return None
    begin, length = max(int(times[0]), axis.start_ns), axis.end_ns - max(int(times[0]), axis.start_ns)
    slots = resolution.slots_within(length, axis.length_ns)
    slot_ns = None
    moments, edges = times, np.append(times.clip(begin), axis.end_ns)
    if len(times) > resolution.steps_per_slot * slots:
        edges = begin + np.linspace(0, length, slots + 1).astype(np.int64)
        moments, slot_ns = _peaks(times, total, edges), axis.length_ns / resolution.slots
    values = {name: _value_at(function, moments) for name, function in functions.items()}
    layers = _layers({name: sizes for name, sizes in values.items() if (sizes > 0).any()})
    return TimelineStack(edges, layers, slot_ns) if layers else None


def _sum(functions: Mapping[str, StepFunction]) -> StepFunction:
    """Return the sum of step functions."""
    times = np.concatenate([np.empty(0, np.int64), *(times for times, _ in functions.values())])
    changes = [np.diff(values.clip(0), prepend=0) for _, values in functions.values()]
    order = np.argsort(times, kind="stable")
    times, total = times[order], np.cumsum(np.concatenate([np.empty(0, np.int64), *changes])[order])
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


def _value_at(function: StepFunction, moments: Ints) -> Ints:
    times, values = function
    before_and_after: Ints = np.append(0, values.clip(0))
    return before_and_after[np.searchsorted(times, moments, side="right")]


def _layers(values: Mapping[str, Ints]) -> tuple[StackLayer, ...]:
    by_size = sorted(values, key=lambda name: (-int(values[name].max()), name))
    styles = category_styles(by_size)
    rest = [name for name in by_size if name not in styles]
    if rest:
        # The smallest layer that has a style becomes a part of the rest.
        smallest = next(name for name in reversed(by_size) if name in styles)
        values = {**values, REST: np.sum([values[name] for name in (smallest, *rest)], axis=0)}
        styles = {REST if name == smallest else name: style for name, style in styles.items()}
    return tuple(StackLayer(name, values[name], style) for name, style in styles.items())
