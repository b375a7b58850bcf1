"""Reads the records of a spool, complete or cut off anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbtide.profiler.agent import spool as kinds

# The layout of `agent.spool.RECORD`.
RECORD = np.dtype(
    [("kind", "u1"), ("code", "u1"), ("small", "<u2"), ("a", "<u4"), ("b", "<u4"), ("c", "<u4")]
    + [(name, "<i8") for name in "wxyz"]
)
Records = npt.NDArray[Any]

# The number of codes that a kind of record may have.
_CODES = {
    kinds.PHASE: len(kinds.PHASES),
    kinds.MEMORY: len(kinds.POOLS),
    kinds.LINK: len(kinds.LINK_SOURCES),
    kinds.GPU_STATE: len(kinds.GPU_QUANTITIES),
    kinds.STOPPED: len(kinds.STOP_REASONS),
    kinds.OP: len(kinds.OPS),
    kinds.DETAILS: len(kinds.DETAIL_MARKS),
}


def read_records(path: Path, notes: list[str]) -> Records | None:
    """Return the complete and valid records of a spool; None, and a note, where it does not even have its header."""
    raw = path.read_bytes()
    records = np.frombuffer(raw[: len(raw) - len(raw) % RECORD.itemsize], RECORD)
    if not len(records) or not has_magic(records[0]):
        notes.append(f"{path.name} holds no records: the process ended or the disk was full before its first")
        return None
    if not is_header(records[0]):
        notes.append(f"{path.name} was written by another version of ebbtide: not read")
        return None
    return records[is_valid(records)]


def has_magic(record: Any) -> bool:
    """Return whether a record is the header of a spool, of any version."""
    return bool(record["kind"] == kinds.HEADER and record["w"] == int.from_bytes(kinds.MAGIC, "little"))


def is_header(record: Any) -> bool:
    """Return whether a record is the header of a spool of this version."""
    return has_magic(record) and bool(record["code"] == kinds.VERSION)


def is_valid(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records have codes that exist: a full disk or a power cut may leave others behind."""
    valid = np.ones(len(records), bool)
    for kind, codes in _CODES.items():
        valid &= (records["kind"] != kind) | (records["code"] < codes)
    valid &= (records["kind"] != kinds.OP) | (records["c"] < len(kinds.RESOURCES))
    return valid
