"""Tests stacks of categories against sums that are computed moment by moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.timeline.axis import Resolution, TimeAxis
from ebbtide.analysis.timeline.panels import (
    StepFunction,
    TimelineStack,
    stack_categories,
)
from ebbtide.analysis.timeline.styles import REST

AXIS = TimeAxis(0, 100, 300, 200)
FINE, COARSE = Resolution(1000, 1), Resolution(8, 1)
NAMES = ("parameter", "activation", "unknown", "mine")


def value(function: StepFunction, moment: int) -> int:
    times, values = function
    index = int(np.searchsorted(times, moment, side="right")) - 1
    return max(int(values[index]), 0) if index >= 0 else 0


@st.composite
def step_functions(draw: st.DrawFn) -> dict[str, StepFunction]:
    functions = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        times = sorted(draw(st.sets(st.integers(0, 400), max_size=40)))
        sizes = draw(
            st.lists(st.integers(-2, 50), min_size=len(times), max_size=len(times))
        )
        functions[name] = np.array(times, np.int64), np.array(sizes, np.int64)
    return functions


def layers(stack: TimelineStack | None) -> dict[str, list[int]]:
    return (
        {}
        if stack is None
        else {layer.name: layer.values.tolist() for layer in stack.layers}
    )


@given(functions=step_functions())
def test_stack_categories__has_the_value_of_each_at_every_moment(
    functions: dict[str, StepFunction],
) -> None:
    stack = stack_categories(functions, AXIS, FINE)
    shown = layers(stack)
    for name, function in functions.items():
        expected = [value(function, moment) for moment in range(100, 300)]
        if stack is None or name not in shown:
            assert not any(expected)
            continue
        at = np.searchsorted(stack.edges, np.arange(100, 300), side="right") - 1
        # Before the first sample of all there is nothing to draw.
        assert [shown[name][index] if index >= 0 else 0 for index in at] == expected
    if stack is not None:
        assert (stack.edges[0] >= 100, stack.edges[-1], stack.slot_ns) == (
            True,
            300,
            None,
        )


@given(functions=step_functions())
def test_stack_categories__reduced_keeps_the_largest_sum_of_each_slot(
    functions: dict[str, StepFunction],
) -> None:
    stack = stack_categories(functions, AXIS, COARSE)
    if stack is None or stack.slot_ns is None:
        return
    tops = stack.borders[-1]
    for number, (start, end) in enumerate(
        zip(stack.edges[:-1].tolist(), stack.edges[1:].tolist(), strict=True)
    ):
        last = end + 1 if number == len(tops) - 1 else end
        sums = [
            sum(value(function, moment) for function in functions.values())
            for moment in range(start, last)
        ]
        assert tops[number] == max(sums)


def test_stack_categories__puts_what_has_no_style_into_one_layer() -> None:
    functions = {f"kind {n}": (np.array([100]), np.array([n + 1])) for n in range(15)}
    stack = stack_categories(functions, AXIS, FINE)
    shown = layers(stack)
    assert len(shown) == 10
    assert shown[REST] == [sum(range(1, 7))]
    assert sum(values[0] for values in shown.values()) == sum(range(1, 16))


def test_stack_categories__is_none_without_memory() -> None:
    assert stack_categories({}, AXIS, FINE) is None
    assert (
        stack_categories(
            {"parameter": (np.array([0, 90]), np.array([5, 0]))}, AXIS, FINE
        )
        is None
    )
