"""Reads from a spool in which iterations `ebbtide profile --attach` had details recorded."""

from __future__ import annotations

from typing import Any

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.trace.spool_records import Records

_BEGIN, _END = kinds.DETAIL_MARKS.index("begin"), kinds.DETAIL_MARKS.index("end")


def detailed_slices(records: Records) -> list[dict[str, Any]]:
    """Return the entries of `detailed_slices` in meta.json.

    A slice without an end, of a process that was killed in it, ends with the last finished iteration. A slice in which
    no iteration ended is left out.
    """
    marks = records[records["kind"] == kinds.DETAILS]
    iterations = records[records["kind"] == kinds.ITERATION]
    slices = []
    for begin in marks[marks["code"] == _BEGIN]:
        ends = marks[(marks["code"] == _END) & (marks["w"] == begin["w"])]
        if len(ends):
            end, end_ns = int(ends[-1]["a"]), int(ends[-1]["x"])
        elif len(iterations):
            end, end_ns = int(iterations[-1]["a"]) + 1, int(iterations[-1]["x"])
        else:
            continue
        if end > begin["a"]:
            slices.append(
                {
                    "iterations": [int(begin["a"]), end],
                    "span_ns": [int(begin["x"]), end_ns],
                    "allocator_iterations": int(begin["b"]),
                    "transfers": bool(begin["small"]),
                }
            )
    return slices
