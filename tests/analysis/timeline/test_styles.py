"""Tests the styles of a timeline."""

from __future__ import annotations

import re
from itertools import pairwise

from ebbtide.analysis.timeline import styles
from ebbtide.analysis.timeline.styles import COLORS, HOST_MEMORY_DASHES, PHASE_OPACITY, link_style, pool_styles


def luminance(color: str, opacity: float) -> float:
    """Return how bright a colour is in grey on white, 0 to 1 (ITU-R BT.601)."""
    red, green, blue = (int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return 1 - opacity * (1 - (0.299 * red + 0.587 * green + 0.114 * blue))


def test_colors__are_complete() -> None:
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for pair in COLORS.values() for color in pair)
    used = {style.color for style in styles.POOL_STYLES.values()} | set(styles.SUBSTEP_COLORS.values())
    used |= {color for style in (styles.WINDOW, styles.RECURRING) for color in (style.fill, style.edge)}
    for direction in ("h2d", "d2h"):
        style = link_style(direction, styles.SOLID)
        used |= {style.color, style.fill or ""}
    assert used | {styles.LEVEL.color, styles.OTHER_SUBSTEP} <= set(COLORS)


def test_phases__differ_in_grey() -> None:
    grey = sorted(luminance(COLORS[phase].light, opacity) for phase, opacity in PHASE_OPACITY.items())
    assert min(b - a for a, b in pairwise(grey)) > 0.025


def test_pool_styles__give_unknown_pools_distinct_styles() -> None:
    pools = [f"pool {number}" for number in range(20)]
    assert len({(style.color, style.dash) for style in pool_styles(pools).values()}) == 20
    assert list(pool_styles(["b", "swap", "a", "device"])) == ["device", "swap", "a", "b"]


def test_host_memory_dashes__differ() -> None:
    assert len(set(HOST_MEMORY_DASHES.values())) == len(HOST_MEMORY_DASHES)
