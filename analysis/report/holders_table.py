"""Builds the table of the page on what holds memory at its peak."""

from __future__ import annotations

from ebbtide.analysis.metrics.holders.holders import Holders
from ebbtide.analysis.report.columns import ReportTable, bytes_column, share_column, text_column
from ebbtide.units import bytes_text, ms_text


def holders_table(holders: Holders | None) -> ReportTable | None:
    """Return the bytes of each category; None where no holder is known."""
    if holders is None or all(holder.category is None for holder in holders.holders):
        return None
    categories = holders.by("category")
    sizes = [size for _, size in categories]
    columns = (
        text_column("category", [category or "not known" for category, _ in categories]),
        bytes_column("bytes", sizes),
        share_column("share", [size / holders.bytes for size in sizes]),
    )
    note = (
        f"{bytes_text(holders.bytes)} of {holders.device} at {ms_text(holders.t_ms)} from the start (pool "
        f"`{holders.pool}`). `ebbtide memory --at peak` also prints modules and call sites."
    )
    return ReportTable("holders", "Memory at the peak", columns, note)
