"""Selects records of a spool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.trace.spool_records import Records

_SEQUENCED = (kinds.PHASE, kinds.GPU_TIMES, kinds.OP)


def sequenced(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records have the sequence number of a phase or an operation in `a`."""
    return np.isin(records["kind"], _SEQUENCED)


def outdated_memory(records: Records, time_ns: int) -> npt.NDArray[np.bool_]:
    """Return which samples of memory no moment after `time_ns` depends on: each holds until the next one."""
    outdated: npt.NDArray[np.bool_] = (records["kind"] == kinds.MEMORY) & (records["x"] < time_ns)
    rows = np.flatnonzero(outdated)
    series = records[["code", "small", "a"]][rows]
    # The last of each series, which holds at `time_ns`: the first one from the end.
    _, first_from_end = np.unique(series[::-1], return_index=True)
    outdated[rows[len(rows) - 1 - first_from_end]] = False
    return outdated
