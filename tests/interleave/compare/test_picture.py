"""The picture of a comparison: each operation at its time in its lane, and readable
texts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

from ebbtide.interleave.compare.picture import draw_comparison
from ebbtide.interleave.compare.results import Comparison
from ebbtide.interleave.model.plan import RESOURCES
from ebbtide.phases import PHASES


@pytest.fixture(scope="module")
def figure(comparison: Comparison) -> Figure:
    return draw_comparison(comparison)


def test_draw_comparison__shows_measured_figures_beside_predicted_ones(
    comparison: Comparison, figure: Figure
) -> None:
    axes, device, host = figure.subfigs[0].axes
    results = comparison.results
    names = [
        name
        for result in results
        for name in (f"{result.policy}  measured", "predicted")
    ]
    assert [
        label.get_text().replace("\n", "") for label in axes.get_yticklabels()
    ] == names
    halves = ("measured", "predicted")
    # A bar for each phase, one after the other.
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    phases = [
        sum(getattr(result.times[phase], half) for phase in PHASES)
        for result in results
        for half in halves
    ]
    assert ends[len(PHASES) - 1 :: len(PHASES)] == pytest.approx(phases)
    medians = [
        getattr(result.times["iteration"], half)
        for result in results
        for half in halves
    ]
    assert [text.get_text() for text in axes.texts] == [
        f"{length:,.0f} ms" for length in medians
    ]
    for panel, pairs in (
        (device, [result.memory.device for result in results]),
        (host, [result.memory.host for result in results]),
    ):
        sizes = [getattr(pair, half) / 2**20 for pair in pairs for half in halves]
        assert [bar.get_width() for bar in panel.patches] == pytest.approx(sizes)
        assert [text.get_text() for text in panel.texts] == [
            f"{size:.3g}" for size in sizes
        ]
    assert (device.get_xlabel(), host.get_xlabel()) == (
        "device memory (MiB)",
        "host memory (MiB)",
    )


def test_draw_comparison__each_operation_is_in_its_lane_at_its_time(
    comparison: Comparison, figure: Figure
) -> None:
    schedules = [
        schedule
        for result in comparison.results
        for schedule in (result.measured, result.predicted)
    ]
    for axes, schedule in zip(figure.subfigs[1].axes, schedules, strict=True):
        extents = [
            path.get_extents().extents.tolist()
            for bars in axes.collections
            for path in bars.get_paths()
        ]
        expected = [
            [
                start,
                1 + RESOURCES.index(op.resource) - 0.42,
                end,
                1 + RESOURCES.index(op.resource) + 0.42,
            ]
            for op, start, end in schedule.items()
            if op.kind != "clip"
        ]
        # What ends in the next iteration continues at the left, and phases have the
        # first lane.
        drawn = [extent for extent in extents if extent[1] > 0.5]
        within = [extent for extent in expected if extent[2] <= schedule.iteration_s]
        apart = (
            np.abs(np.array(within)[:, None] - np.array(drawn)).max(axis=2).min(axis=1)
        )
        assert apart.max() <= 1e-6 * schedule.iteration_s
        assert len(drawn) >= len(expected)
        left, right = axes.get_xlim()
        assert left <= 0.0
        assert max(extent[2] for extent in extents) <= right


def test_draw_comparison__no_text_overlaps_another_or_is_cut_off(
    figure: Figure,
) -> None:
    figure.draw_without_rendering()
    all_axes = [axes for part in figure.subfigs for axes in part.axes]
    texts = [
        text
        for axes in all_axes
        for text in (*axes.texts, *axes.get_yticklabels(), axes.title)
    ]
    texts += [axes._left_title for axes in all_axes]
    texts += [axes.xaxis.label for axes in all_axes]
    texts += [
        figure._suptitle,
        *(text for part in figure.subfigs for text in part.legends[0].get_texts()),
    ]
    boxes = [
        text.get_window_extent()
        for text in texts
        if text is not None and text.get_text() and text.get_visible()
    ]
    assert all(
        figure.bbox.contains(*corner)
        for text_box in boxes
        for corner in (text_box.min, text_box.max)
    )
    assert not any(
        one.overlaps(other) for one, other in itertools.combinations(boxes, 2)
    )
