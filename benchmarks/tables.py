"""Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def percent(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


def spread(values: Sequence[float], digits: int) -> str:
    """Median (least to most)."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |", flush=True)
    print()
