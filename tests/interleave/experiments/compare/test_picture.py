"""The picture shows each operation where and when it was."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.collections import PolyCollection

from ebbtide.analysis.plot import save
from ebbtide.interleave.experiments.compare.picture import picture
from ebbtide.interleave.experiments.compare.results import Comparison
from ebbtide.interleave.model.plan import RESOURCES


def test_each_operation_is_drawn_in_its_lane_at_its_time(found: Comparison) -> None:
    figure = picture(found)
    assert len(figure.axes) == len(found.results)
    for axes, result in zip(figure.axes, found.results, strict=True):
        boxes = [
            path.get_extents().extents.tolist()
            for bars in axes.collections
            if isinstance(bars, PolyCollection)
            for path in bars.get_paths()
        ]
        expected = []
        for top, schedule in ((0.0, result.measured), (4.6, result.predicted)):
            begin = schedule.iteration_s - schedule.update_s
            for op, start, end in schedule.items():
                if op.kind != "clip":
                    lane = top + RESOURCES.index(op.resource)
                    expected.append([1e3 * (start - begin), lane - 0.42, 1e3 * (end - begin), lane + 0.42])
        assert sorted(boxes) == [pytest.approx(box) for box in sorted(expected)]
        left, right = axes.get_xlim()
        assert left <= min(box[0] for box in boxes)
        assert max(box[2] for box in boxes) <= right


def test_it_says_what_it_shows_in_units_and_that_the_device_is_emulated(found: Comparison) -> None:
    figure = picture(found)
    assert "emulated device: these times tell nothing about a GPU" in figure.get_suptitle()
    assert figure.axes[-1].get_xlabel().endswith("(ms)")
    for axes, result in zip(figure.axes, found.results, strict=True):
        assert axes.get_title(loc="left").startswith(f"{result.policy}: update measured ")
        assert [text.get_text() for text in axes.texts] == ["measured", "predicted"]
        assert [label.get_text() for label in axes.get_yticklabels()] == list(RESOURCES) * 2
    (legend,) = figure.legends
    kinds = {op.kind for result in found.results for op in result.predicted.plan.ops} - {"clip"}
    assert {text.get_text() for text in legend.get_texts()} == kinds | {"end of the update"}


def test_no_text_lies_on_another_or_outside(found: Comparison) -> None:
    figure = picture(found)
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels(), axes.title)]
    texts += [axes._left_title for axes in figure.axes]
    texts += [figure._suptitle, *figure.legends[0].get_texts(), figure.axes[-1].xaxis.label]
    boxes = [text.get_window_extent() for text in texts if text is not None and text.get_text()]
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


@pytest.mark.parametrize(("kind", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_it_is_written_in_all_formats(found: Comparison, tmp_path: Path, kind: str, head: bytes) -> None:
    save(picture(found), tmp_path / "picture", kind)
    assert (tmp_path / "picture").read_bytes().startswith(head)
