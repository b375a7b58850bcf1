"""Reads the records of a spool, complete or cut off anywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.trace.untrusted import open_regular

# The layout of `agent.spool.RECORD`.
RECORD = np.dtype(
    [
        ("kind", "u1"),
        ("code", "u1"),
        ("small", "<u2"),
        ("a", "<u4"),
        ("b", "<u4"),
        ("c", "<u4"),
    ]
    + [(name, "<i8") for name in "wxyz"]
)
Records = npt.NDArray[Any]

# The number of codes that a kind of record may have.
_CODES = {
    kinds.PHASE: len(kinds.PHASES),
    kinds.ITERATION: len(kinds.ITERATION_MARKS),
    kinds.MEMORY: len(kinds.POOLS),
    kinds.LINK: len(kinds.LINK_SOURCES),
    kinds.GPU_STATE: len(kinds.GPU_QUANTITIES),
    kinds.STOPPED: len(kinds.STOP_REASONS),
    kinds.OP: len(kinds.OPS),
    kinds.DETAILS: len(kinds.DETAIL_MARKS),
}
_UPDATED, _ENDED, _ = range(len(kinds.ITERATION_MARKS))
NO_OPTIMIZER_NOTE = (
    "no optimizer of torch stepped: iterations are cut where a forward follows a "
    "backward, and updates are missing; "
    'mark them with Tracer(...).phase("update")'
)
_BEGIN, _END = kinds.DETAIL_MARKS.index("begin"), kinds.DETAIL_MARKS.index("end")


def read_records(path: Path, notes: list[str]) -> Records | None:
    """Return the complete and valid records of a spool.

    Return None, and a note, where it does not even have its header.
    """
    with open_regular(path) as file:
        raw = file.read()
    records = np.frombuffer(raw[: len(raw) - len(raw) % RECORD.itemsize], RECORD)
    if not len(records) or not has_magic(records[0]):
        notes.append(
            f"{path.name} holds no records: the process ended or the disk was full "
            "before its first"
        )
        return None
    if not is_header(records[0]):
        notes.append(f"{path.name} was written by another version of ebbtide: not read")
        return None
    return records[is_valid(records)]


def has_magic(record: Any) -> bool:
    """Return whether a record is the header of a spool, of any version."""
    return bool(
        record["kind"] == kinds.HEADER
        and record["w"] == int.from_bytes(kinds.MAGIC, "little")
    )


def is_header(record: Any) -> bool:
    """Return whether a record is the header of a spool of this version."""
    return has_magic(record) and bool(record["code"] == kinds.VERSION)


def stop_reason(records: Records) -> str | None:
    """Return one of `spool.STOP_REASONS`.

    Return None while more may be recorded, or where the process was killed.
    """
    stopped = records[records["kind"] == kinds.STOPPED]
    return kinds.STOP_REASONS[int(stopped[-1]["code"])] if len(stopped) else None


def first_start_ns(records: Records) -> int | None:
    """Return the start of the first recorded iteration, else of the first phase.

    Return None before both.
    """
    starts = records[records["kind"] == kinds.START]["x"]
    phases = records[records["kind"] == kinds.PHASE]["x"]
    return (
        int(starts[-1]) if len(starts) else int(phases.min()) if len(phases) else None
    )


def is_valid(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records have codes that exist.

    A full disk or a power cut may leave others behind.
    """
    valid = np.ones(len(records), bool)
    for kind, codes in _CODES.items():
        valid &= (records["kind"] != kind) | (records["code"] < codes)
    valid &= (records["kind"] != kinds.OP) | (records["c"] < len(kinds.RESOURCES))
    return valid


def ended_by_updates(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records say that an update has ended an iteration."""
    marks: npt.NDArray[np.bool_] = (records["kind"] == kinds.ITERATION) & (
        records["code"] == _UPDATED
    )
    return marks


def has_updates(records: Records) -> bool:
    """Return whether an optimizer has ended an iteration."""
    return bool(ended_by_updates(records).any())


def iteration_ends(records: Records) -> dict[int, int]:
    """Return the sequence number of the last phase of each finished iteration, in
    order."""
    ends = records[records["kind"] == kinds.ITERATION]
    updated = ends["code"] == _UPDATED
    if updated.any():
        ends = ends[updated]
    elif not (ends["code"] == _ENDED).any():
        # One backward may be part of an iteration whose update was not reached.
        return {}
    # A later record of the same iteration replaces the earlier: a second optimizer
    # extended it.
    return dict(sorted(zip(ends["a"].tolist(), ends["b"].tolist(), strict=True)))


def note_on_iterations(records: Records) -> str | None:
    """Return the note on iterations that no optimizer ended; None without any."""
    if has_updates(records) or not iteration_ends(records):
        return None
    return NO_OPTIMIZER_NOTE


def detailed_slices(records: Records) -> list[dict[str, Any]]:
    """Return `detailed_slices` of meta.json.

    A slice without an end ends with the last finished iteration.
    """
    marks = records[records["kind"] == kinds.DETAILS]
    iterations = records[ended_by_updates(records)]
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
