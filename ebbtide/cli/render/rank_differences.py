"""Prints the ranks that differ from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.render.tables import MAX_ROWS, print_omitted, print_table

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.ranks.differences import RankDifferences


def print_differences(differences: RankDifferences) -> None:
    """Print a table of the ranks and hosts that differ; nothing where none does."""
    from ebbtide.analysis.metrics.ranks.differences import ranks_text

    if not differences.differences:
        return
    rows = [
        [
            difference.name,
            ranks_text(difference.ranks) if difference.is_host else difference.host or "",
            difference.cause,
            "\n".join([*(deviation.text for deviation in difference.deviations), *difference.facts]),
        ]
        for difference in differences.differences
    ]
    title = f"Ranks that differ from the others: {len(differences.ranks)} of {differences.compared}"
    where = "host" if differences.hosts else ""
    print_table(title, ["", where, "cause", "median over the iterations"], rows[:MAX_ROWS], text_columns=4)
    print_omitted(len(rows))
