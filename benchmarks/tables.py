"""Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def percent(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |", flush=True)
    print()
