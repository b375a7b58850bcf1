"""Colours, dashes and opacities of a timeline, the same in plots and in the report.

What can be confused also differs by dash, opacity or outline, for colour-blind readers
and grey print.
"""

from collections.abc import Iterable
from typing import NamedTuple

# Dashes of lines as lengths of dashes and gaps, in line widths; empty for a solid line.
Dash = tuple[float, ...]
SOLID: Dash = ()
_LONG: Dash = (6, 1.5)
_SHORT: Dash = (2.5, 1)
_DOTTED: Dash = (1, 1)
_DASH_DOT: Dash = (3, 1, 1, 1)
_DASH_DOT_DOT: Dash = (6, 1.2, 1, 1.2, 1, 1.2)


class Color(NamedTuple):
    """One colour on a light and on a dark background, as #rrggbb."""

    light: str
    dark: str


# Least width of a line on a screen.
_MIN_PIXELS = 1.0


class LineStyle(NamedTuple):
    """Style of a line."""

    color: str  # Key of COLORS.
    width: float  # Points.
    dash: Dash = SOLID  # See `Dash`.
    # Key of COLORS for the area below the line; None where it is not filled.
    fill: str | None = None

    @property
    def on_screen(self) -> tuple[float, list[int]]:
        """Width, and lengths of dashes and gaps, in pixels.

        There are no lengths for a solid line.
        """
        width = max(self.width, _MIN_PIXELS)
        return width, [max(1, round(length * width)) for length in self.dash]


class AreaStyle(NamedTuple):
    """Style of an area."""

    color: str  # Key of COLORS.
    # Key of HATCHES, so that areas differ in grey too; None for a plain area.
    hatch: str | None = None


class BoxStyle(NamedTuple):
    """Style of a box: keys of COLORS, and the width of the outline in points."""

    fill: str
    edge: str
    edge_width: float


COLORS = {
    "forward": Color("#7fb3e6", "#8fc1f0"),
    "backward": Color("#f2b179", "#e0a066"),
    "update": Color("#93c98f", "#69a765"),
    "other": Color("#d3d9de", "#46505a"),
    "device": Color("#222222", "#e2e8ed"),
    "reserved": Color("#8856a7", "#b68fd4"),
    "allocated": Color("#c51b3b", "#f0687f"),
    "requested": Color("#e05a7c", "#e7a3b4"),
    "tensors": Color("#1b4f72", "#8fbbdc"),
    "heap": Color("#c51b3b", "#f0687f"),
    "rss": Color("#555555", "#a2a9b1"),
    "host": Color("#222222", "#e2e8ed"),
    "pinned": Color("#2b7a78", "#6fc0bd"),
    "swap": Color("#b07d00", "#dcae4a"),
    "h2d": Color("#1f6f8b", "#55b5d6"),
    "h2d-fill": Color("#a9cbd6", "#1f4450"),
    "d2h": Color("#d1495b", "#f08794"),
    "d2h-fill": Color("#efbfc5", "#57303a"),
    "level": Color("#222222", "#e2e8ed"),
    "window": Color("#faf3d9", "#38331f"),
    "window-edge": Color("#b9a66a", "#8a7c4c"),
    "recurring": Color("#ecd587", "#75662e"),
    "recurring-edge": Color("#8a7022", "#c9b263"),
    "extra-1": Color("#3f78c0", "#3f78c0"),
    "extra-2": Color("#d27f33", "#d27f33"),
    "extra-3": Color("#459a4a", "#459a4a"),
    "extra-4": Color("#9a63c4", "#9a63c4"),
    "extra-5": Color("#b39a1e", "#b39a1e"),
    "extra-6": Color("#b5523f", "#b5523f"),
    "extra-7": Color("#2a9fb0", "#2a9fb0"),
    "extra-8": Color("#c9609f", "#c9609f"),
    "category-1": Color("#332288", "#6a5fd0"),
    "category-2": Color("#ddcc77", "#e3d58a"),
    "category-3": Color("#117733", "#3c9a5a"),
    "category-4": Color("#88ccee", "#9fd6f2"),
    "category-5": Color("#882255", "#c2528c"),
    "category-6": Color("#e6a0b4", "#f0b3c4"),
    "category-7": Color("#7b5fb3", "#9a7ee0"),
    "category-8": Color("#d9dde0", "#5d6872"),
    "category-9": Color("#44aa99", "#4fb8a6"),
    "category-10": Color("#6b5a1e", "#a8904a"),
    "compute": Color("#1b4f72", "#8ad0f5"),
    "communication": Color("#8856a7", "#a578cc"),
    "copy": Color("#d99a2b", "#e0ad55"),
    "late-launch": Color("#e8a27c", "#f0b592"),
    "host-busy": Color("#8c2f26", "#c4564a"),
    "queue": Color("#5f7d95", "#8fa9bd"),
    "unknown-cause": Color("#cfd5da", "#5f6a74"),
}

PHASE_COLORS = {
    phase: COLORS[phase].light for phase in ("forward", "backward", "update")
}
# Phases behind lines. In grey they differ by these.
PHASE_OPACITY = {"forward": 0.2, "backward": 0.4, "update": 0.62}

# Pools are drawn and named in this order; other pools follow by name.
POOL_STYLES = {
    "device": LineStyle("device", 1.7),
    "reserved": LineStyle("reserved", 1.4, _LONG),
    "allocated": LineStyle("allocated", 1.4, _SHORT),
    "requested": LineStyle("requested", 1.0, _DOTTED),
    "tensors": LineStyle("tensors", 1.5, _DASH_DOT),
    "heap": LineStyle("heap", 1.5),
    "rss": LineStyle("rss", 1.2, _DASH_DOT_DOT),
    "host": LineStyle("host", 1.5),
    "pinned": LineStyle("pinned", 1.3, _DASH_DOT),
    "swap": LineStyle("swap", 1.2, _DOTTED),
}
# The line of a pool along the top of the stack of its parts.
STACK_TOP = LineStyle("tensors", 0.8)
_EXTRA_COLORS = [name for name in COLORS if name.startswith("extra-")]
_EXTRA_DASHES = (SOLID, _LONG, _DASH_DOT, _DOTTED)

# Patterns of lines over areas.
HATCHES = ("rising", "falling", "dots", "cross", "horizontal")
# Categories of memory from the bottom of a stack, those that change least first, as
# torch's profiler names them.
CATEGORY_STYLES = {
    "parameter": AreaStyle("category-1"),
    "buffer": AreaStyle("category-9"),
    "optimizer_state": AreaStyle("category-2", "rising"),
    "gradient": AreaStyle("category-3"),
    "activation": AreaStyle("category-4"),
    "autograd_detail": AreaStyle("category-5", "falling"),
    "input": AreaStyle("category-6", "dots"),
    "temporary": AreaStyle("category-7", "cross"),
    "unknown": AreaStyle("category-8"),
}
# For categories of other names, and for all that are more than there are styles.
_OTHER_CATEGORY_STYLES = (AreaStyle("category-10", "horizontal"),)
REST = "all others"

# Kinds of activity of a GPU, and causes of its idle time.
ACTIVITY_STYLES = {
    "compute": AreaStyle("compute"),
    "communication": AreaStyle("communication"),
    "copy": AreaStyle("copy"),
    "host_busy": AreaStyle("host-busy"),
    "launch_call": AreaStyle("host-busy", "rising"),
    "late_launch": AreaStyle("late-launch"),
    "queue": AreaStyle("queue"),
    "unknown": AreaStyle("unknown-cause"),
    "not recorded": AreaStyle("other", "rising"),
}

LINK_COLORS = {direction: COLORS[direction].light for direction in ("h2d", "d2h")}
UNKNOWN_HOST_MEMORY = "unknown host memory"
HOST_MEMORY_DASHES: dict[str, Dash] = {
    "pinned": SOLID,
    "pageable": _SHORT,
    UNKNOWN_HOST_MEMORY: _DOTTED,
}

# A line across a panel: the capacity of a device, the peak of a link.
LEVEL = LineStyle("level", 1.0, (5, 3))
WINDOW = BoxStyle("window", "window-edge", 0.4)
# Darker, with a stronger outline.
RECURRING = BoxStyle("recurring", "recurring-edge", 0.6)

# Colours of sub-steps by name; a sub-step that is nested in another one comes after it.
# Others have OTHER_SUBSTEP.
SUBSTEP_COLORS = {
    "reduce": "extra-4",
    "gradient norm": "extra-5",
    "overflow check": "extra-5",
    "clip": "extra-5",
    "prepare": "extra-8",
    "release": "extra-8",
    "gather": "extra-1",
    "unscale": "extra-2",
    "cast": "extra-2",
    "update": "update",
    "selective update": "extra-3",
    "select columns": "extra-5",
    "rollback": "extra-6",
    "wait": "unknown-cause",
    "parameters": "h2d",
    "upload": "h2d",
    "fetch": "extra-7",
    "gradient up": "extra-4",
    "gradient down": "d2h",
    "parameters down": "d2h",
    "flush": "extra-6",
    "read": "extra-3",
    "write": "extra-2",
    "gradient read": "extra-4",
    "gradient write": "d2h",
}
OTHER_SUBSTEP = "other"


def pool_styles(pools: Iterable[str]) -> dict[str, LineStyle]:
    """Return a style for each pool, in drawing order.

    Pools without a style of their own get one by their rank.
    """
    order = list(POOL_STYLES)
    names = sorted(
        pools,
        key=lambda pool: (order.index(pool) if pool in order else len(order), pool),
    )
    others = [pool for pool in names if pool not in POOL_STYLES]
    extra = {
        pool: LineStyle(
            _EXTRA_COLORS[number % len(_EXTRA_COLORS)],
            1.3,
            # Repeated colours get another dash.
            _EXTRA_DASHES[(number + number // len(_EXTRA_COLORS)) % len(_EXTRA_DASHES)],
        )
        for number, pool in enumerate(others)
    }
    return {pool: POOL_STYLES.get(pool) or extra[pool] for pool in names}


def category_styles(categories: Iterable[str]) -> dict[str, AreaStyle]:
    """Return a style for each category, from the bottom of a stack.

    No two are the same. The most important categories come first; categories without a
    style left are not in the result.
    """
    names = list(dict.fromkeys(categories))
    styles = {name: CATEGORY_STYLES[name] for name in names if name in CATEGORY_STYLES}
    free = [
        *_OTHER_CATEGORY_STYLES,
        *(style for style in CATEGORY_STYLES.values() if style not in styles.values()),
    ]
    styles |= zip((name for name in names if name not in styles), free, strict=False)
    order = [*CATEGORY_STYLES.values(), *_OTHER_CATEGORY_STYLES]
    return dict(sorted(styles.items(), key=lambda item: order.index(item[1])))


def link_style(direction: str, dash: Dash) -> LineStyle:
    """Return the style of a link line.

    The dash names the kind of host memory (HOST_MEMORY_DASHES).
    """
    return LineStyle(direction, 0.8, dash, f"{direction}-fill")
