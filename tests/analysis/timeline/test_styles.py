"""Tests the styles of a timeline."""

from __future__ import annotations

import itertools
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ebbtide.analysis.timeline import styles
from ebbtide.analysis.timeline.activity import IDLE_CAUSES
from ebbtide.analysis.timeline.styles import (
    ACTIVITY_STYLES,
    CATEGORY_STYLES,
    COLORS,
    HATCHES,
    PHASE_OPACITY,
    AreaStyle,
    category_styles,
    link_style,
    pool_styles,
)


def luminance(color: str, opacity: float) -> float:
    """Return how bright a colour is in grey on white, 0 to 1 (ITU-R BT.601)."""
    red, green, blue = (int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return 1 - opacity * (1 - (0.299 * red + 0.587 * green + 0.114 * blue))


def test_colors__are_complete() -> None:
    assert all(
        re.fullmatch("#[0-9a-f]{6}", color)
        for pair in COLORS.values()
        for color in pair
    )
    used = {style.color for style in styles.POOL_STYLES.values()} | set(
        styles.SUBSTEP_COLORS.values()
    )
    used |= {
        color
        for style in (styles.WINDOW, styles.RECURRING)
        for color in (style.fill, style.edge)
    }
    for direction in ("h2d", "d2h"):
        style = link_style(direction, styles.SOLID)
        used |= {style.color, style.fill or ""}
    used |= {
        style.color
        for style in (
            *CATEGORY_STYLES.values(),
            *ACTIVITY_STYLES.values(),
            styles.STACK_TOP,
        )
    }
    assert used | {styles.LEVEL.color, styles.OTHER_SUBSTEP} <= set(COLORS)


def test_phases__differ_in_grey() -> None:
    grey = sorted(
        luminance(COLORS[phase].light, opacity)
        for phase, opacity in PHASE_OPACITY.items()
    )
    assert min(b - a for a, b in pairwise(grey)) > 0.025


def test_lines__of_one_panel_differ_by_dash() -> None:
    panels = (
        ("device", "reserved", "allocated", "requested", "tensors"),
        ("heap", "rss", "swap"),
        ("host", "rss", "pinned", "swap"),
    )
    dashes = [[styles.POOL_STYLES[pool].dash for pool in pools] for pools in panels]
    for in_one_panel in (*dashes, [*styles.HOST_MEMORY_DASHES.values()]):
        assert len(set(in_one_panel)) == len(in_one_panel)


def test_pool_styles__give_unknown_pools_distinct_styles() -> None:
    pools = [f"pool {number}" for number in range(20)]
    assert (
        len({(style.color, style.dash) for style in pool_styles(pools).values()}) == 20
    )
    assert list(pool_styles(["b", "swap", "a", "device"])) == [
        "device",
        "swap",
        "a",
        "b",
    ]


# Colours as people see them who lack one kind of cone (Machado, Oliveira and Fernandes
# 2009, severity 1), linear RGB.
SIGHT = {
    "all cones": np.eye(3),
    "no red": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "no green": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
IDLE = {ACTIVITY_STYLES[cause].color for cause in IDLE_CAUSES}
TO_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)


def lab(color: str, sight: str) -> np.ndarray[Any, Any]:
    """Return lightness and hue of a colour in CIELAB, in which distances are as people
    see them."""
    rgb = np.array([int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(SIGHT[sight] @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("background", ["light", "dark"])
@pytest.mark.parametrize("styles_of", [CATEGORY_STYLES, ACTIVITY_STYLES])
def test_area_styles__differ_for_color_blind_readers_and_in_grey(
    background: str, styles_of: dict[str, AreaStyle]
) -> None:
    used = [*styles_of.values()]
    assert len({style.color for style in used}) == len(used)
    assert {style.hatch for style in used if style.hatch} <= set(HATCHES)
    pairs = list(itertools.combinations(used, 2))
    for one, other in pairs:
        colors = [getattr(COLORS[style.color], background) for style in (one, other)]
        for sight in SIGHT:
            distance = float(
                np.linalg.norm(lab(colors[0], sight) - lab(colors[1], sight))
            )
            # 2.3 is the least that people notice.
            assert distance > 9 or one.hatch != other.hatch, (
                one,
                other,
                sight,
                distance,
            )
        # On paper only lightness remains: what has none of its own has a hatch.
        difference = abs(
            float(lab(colors[0], "all cones")[0] - lab(colors[1], "all cones")[0])
        )
        # The other kinds of activity have lanes of their own.
        in_one_stack = styles_of is CATEGORY_STYLES or {one.color, other.color} <= IDLE
        if background == "light" and in_one_stack:
            assert difference > 5 or one.hatch != other.hatch, (one, other, difference)


def test_category_styles__are_of_the_category_and_distinct() -> None:
    names = [
        "b",
        "activation",
        "parameter",
        "a",
        *(f"category {number}" for number in range(20)),
    ]
    given = category_styles(names)
    assert given["activation"] == CATEGORY_STYLES["activation"]
    assert next(iter(given)) == "parameter"
    assert len(set(given.values())) == len(given) == 10
    assert {"a", "b"} <= set(given)
