"""Fits text into the room that a figure has for it. All functions but `plain_text` need
the final layout."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from ebbtide.analysis.plot.panels import NOTE_COLOR, TEXT_COLOR
from ebbtide.analysis.timeseries.step_functions import Floats

# Points between texts, and between a text and the edge of its box.
_GAP = 3.0
_BOX_FONT, _NUMBER_FONT = 7.0, 7.5
# Boxes with less room than this have no label. Most boxes of many iterations are that
# small: not worth measuring.
_MIN_BOX_ROOM = 6.0
_STRIDES = [
    scale * step
    for scale in (1, 10, 100, 1000, 10**4, 10**5, 10**6)
    for step in (1, 2, 5)
]


def plain_text(text: str) -> str:
    """Return text of a trace as Matplotlib can draw it: on one line, valid Unicode, and
    not hidden from legends."""
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    # Legends skip labels that begin with an underscore.
    return f" {text}" if text.startswith("_") else text


def size_in_points(figure: Figure, text: str, font_size: float) -> tuple[float, float]:
    """Return (width, height) of a line of text."""
    renderer = cast(Any, figure.canvas).get_renderer()
    width, height, _ = renderer.get_text_width_height_descent(
        text, FontProperties(size=font_size), False
    )
    return width * 72 / figure.dpi, height * 72 / figure.dpi


def shorten_text(figure: Figure, text: str, font_size: float, max_width: float) -> str:
    """Replace as much of the middle of a text by an ellipsis as does not fit into a
    width in points."""
    if size_in_points(figure, text, font_size)[0] <= max_width:
        return text
    cuts = [
        f"{text[: length - length // 2]}…{text[len(text) - length // 2 :]}"
        for length in range(1, len(text))
    ]
    return cuts[
        bisect_right(
            cuts, max_width, key=lambda cut: size_in_points(figure, cut, font_size)[0]
        )
        - 1
    ]


def label_boxes(
    axes: Axes,
    left: Floats,
    right: Floats,
    bottom: Floats,
    top: Floats,
    texts: Sequence[str],
) -> None:
    """Write a text into each box that has room for it horizontally, or else vertically;
    empty texts are left out."""
    low = _to_points(axes, np.stack([np.clip(left, *axes.get_xlim()), bottom], axis=1))
    high = _to_points(axes, np.stack([np.clip(right, *axes.get_xlim()), top], axis=1))
    figure = cast(Figure, axes.get_figure())
    style: dict[str, Any] = {
        "fontsize": _BOX_FONT,
        "ha": "center",
        "va": "center",
        "color": TEXT_COLOR,
        "zorder": 3,
    }
    for (x0, y0), (x1, y1), text in zip(low, high, texts, strict=True):
        room_x, room_y = x1 - x0 - _GAP, y1 - y0 - _GAP
        if not text or min(room_x, room_y) < _MIN_BOX_ROOM:
            continue
        width, height = size_in_points(figure, text, _BOX_FONT)
        is_horizontal = width <= room_x and height <= room_y
        if is_horizontal or (width <= room_y and height <= room_x):
            center = axes.transData.inverted().transform(
                np.array([x0 + x1, y0 + y1]) / 2 * figure.dpi / 72
            )
            axes.text(
                center[0], center[1], text, rotation=0 if is_horizontal else 90, **style
            )


def number_iterations(axes: Axes, middles: Floats, numbers: Sequence[int]) -> None:
    """Write the numbers of iterations above the axes, each, each second, each fifth and
    so on, so that none overlap."""
    figure = cast(Figure, axes.get_figure())
    widths = np.array(
        [
            size_in_points(figure, "0" * len(str(number)), _NUMBER_FONT)[0]
            for number in numbers
        ]
    )
    centers = _to_points(axes, np.stack([middles, np.zeros(len(middles))], axis=1))[
        :, 0
    ]
    for stride in _STRIDES:
        shown = [index for index, number in enumerate(numbers) if number % stride == 0]
        gaps = np.diff(centers[shown]) - (widths[shown][1:] + widths[shown][:-1]) / 2
        if (gaps >= _GAP).all():
            break
    style: dict[str, Any] = {
        "ha": "center",
        "va": "bottom",
        "fontsize": _NUMBER_FONT,
        "color": NOTE_COLOR,
        "textcoords": "offset points",
    }
    for index in shown:
        anchor = middles[index], 1.0
        axes.annotate(
            str(numbers[index]),
            anchor,
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3),
            **style,
        )


def _to_points(axes: Axes, data: Floats) -> Floats:
    return (
        np.asarray(axes.transData.transform(data))
        * 72
        / cast(Figure, axes.get_figure()).dpi
    )
