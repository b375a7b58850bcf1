"""Text that has room where it stands. All of this needs a layout that is final."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from ebbtide.analysis.timeseries.step_functions import Floats

# Points between texts, and between a text and the edge of its box.
_GAP = 3.0
_STRIDES = [scale * step for scale in (1, 10, 100, 1000, 10**4, 10**5, 10**6) for step in (1, 2, 5)]


def plain(text: str) -> str:
    """Text from elsewhere as matplotlib can draw it: on one line, of whole letters, and never hidden from a legend."""
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return f" {text}" if text.startswith("_") else text


def size_in_points(figure: Figure, text: str, font_size: float) -> tuple[float, float]:
    """(width, height) of a line of text."""
    renderer = cast(Any, figure.canvas).get_renderer()
    width, height, _ = renderer.get_text_width_height_descent(text, FontProperties(size=font_size), False)
    return width * 72 / figure.dpi, height * 72 / figure.dpi


def shortened(figure: Figure, text: str, font_size: float, points: float) -> str:
    """The text, without as much of its middle as does not fit into so many points."""
    if size_in_points(figure, text, font_size)[0] <= points:
        return text
    cuts = [_cut(text, length) for length in range(1, len(text))]
    return cuts[bisect_right(cuts, points, key=lambda cut: size_in_points(figure, cut, font_size)[0]) - 1]


def _cut(text: str, length: int) -> str:
    tail = length // 2
    return f"{text[: length - tail]}…{text[len(text) - tail :]}"


def label_boxes(axes: Axes, left: Floats, right: Floats, bottom: Floats, top: Floats, texts: Sequence[str]) -> None:
    """Write a text into each box that has room for it, upright or along the box."""
    low = _points(axes, np.stack([np.clip(left, *axes.get_xlim()), bottom], axis=1))
    high = _points(axes, np.stack([np.clip(right, *axes.get_xlim()), top], axis=1))
    figure = cast(Figure, axes.get_figure())
    for (x0, y0), (x1, y1), text in zip(low, high, texts, strict=True):
        wide, tall = x1 - x0 - _GAP, y1 - y0 - _GAP
        # Most boxes of many iterations have room for nothing: they are not worth measuring.
        if not text or min(wide, tall) < 6:
            continue
        width, height = size_in_points(figure, text, 7)
        lies = width <= wide and height <= tall
        if lies or (width <= tall and height <= wide):
            at = axes.transData.inverted().transform(np.array([x0 + x1, y0 + y1]) / 2 * figure.dpi / 72)
            style: dict[str, Any] = {"fontsize": 7, "ha": "center", "va": "center", "color": "#222222", "zorder": 3}
            axes.text(at[0], at[1], text, rotation=0 if lies else 90, **style)


def number_iterations(axes: Axes, middles: Floats, numbers: Sequence[int]) -> None:
    """Write numbers above the axes, every one, every second, every fifth and so on, so that they stand apart."""
    figure = cast(Figure, axes.get_figure())
    widths = np.array([size_in_points(figure, "0" * len(str(number)), 7.5)[0] for number in numbers])
    places = _points(axes, np.stack([middles, np.zeros(len(middles))], axis=1))[:, 0]
    for stride in _STRIDES:
        kept = [place for place, number in enumerate(numbers) if number % stride == 0]
        gaps = np.diff(places[kept]) - (widths[kept][1:] + widths[kept][:-1]) / 2
        if (gaps >= _GAP).all():
            break
    style: dict[str, Any] = {
        "ha": "center",
        "va": "bottom",
        "fontsize": 7.5,
        "color": "#444444",
        "textcoords": "offset points",
    }
    for place in kept:
        at = middles[place], 1.0
        axes.annotate(str(numbers[place]), at, xycoords=axes.get_xaxis_transform(), xytext=(0, 3), **style)


def _points(axes: Axes, data: Floats) -> Floats:
    return np.asarray(axes.transData.transform(data)) * 72 / cast(Figure, axes.get_figure()).dpi
