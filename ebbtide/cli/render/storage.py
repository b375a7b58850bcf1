"""Prints what a job reads from storage and writes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide.cli.render.tables import print_table
from ebbtide.units import bytes_text, ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.storage import StorageUse


def print_storage(uses: Sequence[StorageUse]) -> None:
    """Print bytes and waits per rank and direction; nothing for a job that does not use storage."""
    if not uses:
        return
    rows = [
        [
            str(use.rank),
            use.direction,
            bytes_text(use.bytes),
            bytes_text(use.gradient_bytes),
            f"{use.requests:,.0f}",
            ms_text(use.in_flight_ms),
            ms_text(use.wait_ms),
            "-" if use.hidden_share is None else f"{100 * use.hidden_share:.0f} %",
        ]
        for use in uses
    ]
    print_table(
        "Storage, per iteration (waits: until reads or writes have ended; hidden: the rest of the time in flight)",
        ["rank", "direction", "bytes", "of gradients", "requests", "in flight", "waits", "hidden"],
        rows,
    )
