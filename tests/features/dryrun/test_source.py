"""The source of the traces that dry runs make."""

from __future__ import annotations

from ebbtide.profiler.trace import TraceBuilder
from ebbtide.profiler.trace.trace import next_line


def test_next_line__is_another_dry_run_where_no_iteration_was_seen() -> None:
    trace = TraceBuilder("predicted").build()
    assert (
        next_line(trace, "summary {}")
        == "next: ebbtide dry-run -- CMD (a job that trains: no iteration was seen)"
    )
