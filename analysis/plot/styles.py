"""What things look like. Nothing is told by colour alone: pictures are printed in grey."""

from __future__ import annotations

from typing import Any, NamedTuple

# As matplotlib takes them: "solid", or the offset and the lengths of dashes and gaps in points.
Dashes = str | tuple[float, tuple[float, ...]]


class PoolStyle(NamedTuple):
    color: str
    width: float
    dashes: Dashes


PHASE_COLORS = {"forward": "#7fb3e6", "backward": "#f2b179", "update": "#93c98f"}
# Unlike in grey too.
PHASE_ALPHAS = {"forward": 0.2, "backward": 0.4, "update": 0.62}

# In this order pools are drawn and named; others follow by their names.
POOL_STYLES = {
    "device": PoolStyle("#222222", 1.7, "solid"),
    "reserved": PoolStyle("#8856a7", 1.4, (0, (6, 1.5))),
    "allocated": PoolStyle("#c51b3b", 1.4, (0, (2.5, 1))),
    "requested": PoolStyle("#e05a7c", 1.0, (0, (1, 1))),
    "heap": PoolStyle("#c51b3b", 1.5, "solid"),
    "rss": PoolStyle("#555555", 1.2, (0, (5, 1.5))),
    "host": PoolStyle("#222222", 1.5, "solid"),
    "pinned": PoolStyle("#2b7a78", 1.3, (0, (3, 1, 1, 1))),
    "swap": PoolStyle("#b07d00", 1.2, (0, (1, 1))),
}
_MORE_COLORS = ("#1b4f72", "#d35400", "#1e8449", "#7d3c98", "#b7950b", "#7b241c", "#2e86c1")
_MORE_DASHES: tuple[Dashes, ...] = ("solid", (0, (6, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)))

LINK_COLORS = {"h2d": "#1f6f8b", "d2h": "#d1495b"}
LINK_FILLS = {"h2d": "#a9cbd6", "d2h": "#efbfc5"}
HOST_MEMORY_DASHES: dict[str, Dashes] = {
    "pinned": "solid",
    "pageable": (0, (2.5, 1)),
    "host memory not told": (0, (1, 1)),
}

LEVEL: dict[str, Any] = {"color": "#222222", "lw": 1.0, "ls": (0, (5, 3))}
WINDOW: dict[str, Any] = {"fc": "#faf3d9", "ec": "#b9a66a", "lw": 0.4}
# Darker, and outlined.
GUARANTEED: dict[str, Any] = {"fc": "#ecd587", "ec": "#8a7022", "lw": 0.6}


def in_order(pools: list[str]) -> list[str]:
    known = list(POOL_STYLES)
    return sorted(pools, key=lambda pool: (known.index(pool) if pool in known else len(known), pool))


def pool_styles(pools: list[str]) -> dict[str, PoolStyle]:
    """A style for each pool, also for those that are not known here."""
    others = [pool for pool in in_order(pools) if pool not in POOL_STYLES]
    more = {
        pool: PoolStyle(_MORE_COLORS[place % len(_MORE_COLORS)], 1.3, _MORE_DASHES[place % len(_MORE_DASHES)])
        for place, pool in enumerate(others)
    }
    return {pool: POOL_STYLES.get(pool) or more[pool] for pool in in_order(pools)}
