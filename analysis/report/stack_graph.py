"""A tree of call stacks as an icicle graph in SVG."""

from __future__ import annotations

from html import escape

from ebbtide.analysis.metrics.holders.categories import CATEGORIES
from ebbtide.analysis.metrics.holders.holders import StackNode
from ebbtide.units import bytes_text

_WIDTH, _ROW_HEIGHT = 1000, 18
# Narrower nodes are left out: they could not be seen, and a page would have thousands.
_MIN_WIDTH = 2.0
_CHAR_WIDTH = 6.2
_MAX_DEPTH = 60


def stack_graph(root: StackNode) -> str:
    """Return the graph: the root on top, below each frame what it called, as wide as its bytes."""
    rectangles: list[str] = []
    depth = _draw(root, 0.0, 0, "root", root.bytes, rectangles)
    height = (depth + 1) * _ROW_HEIGHT
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Call stacks that hold {bytes_text(root.bytes)}">{"".join(rectangles)}</svg>'
    )


def _draw(node: StackNode, left: float, depth: int, category: str, total: int, rectangles: list[str]) -> int:
    """Add the rectangles of a node and of those below it; return the depth of the deepest."""
    width = _WIDTH * node.bytes / total
    chars = int((width - 4) / _CHAR_WIDTH)
    label = node.label if len(node.label) <= chars else node.label[: chars - 1] + "…" if chars > 3 else ""
    tooltip = f"{node.label}: {bytes_text(node.bytes)} ({node.bytes / total:.1%})"
    top = depth * _ROW_HEIGHT
    rectangles.append(
        f'<g class="{category}"><title>{escape(tooltip)}</title>'
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_ROW_HEIGHT - 1}"/>'
        f'<text x="{left + 3:.2f}" y="{top + 13}">{escape(label)}</text></g>'
    )
    deepest = depth
    for child in node.largest_first() if depth < _MAX_DEPTH else ():
        if _WIDTH * child.bytes / total < _MIN_WIDTH:
            break
        own = (child.label if child.label in CATEGORIES else "unknown") if depth == 0 else category
        deepest = max(deepest, _draw(child, left, depth + 1, own, total, rectangles))
        left += _WIDTH * child.bytes / total
    return deepest
