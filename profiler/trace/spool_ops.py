"""Reads the operations of a spool; and, for phases as well, their iterations and device times."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import MISSING, NO_SUBGROUP
from ebbtide.profiler.trace.iteration_ends import iteration_ends
from ebbtide.profiler.trace.schema import empty_frame, frame
from ebbtide.profiler.trace.spool_records import Records


def iterations(records: Records, sequence: npt.NDArray[Any]) -> Any:
    """Return the iteration of each phase or operation by sequence number; missing where no iteration ended after it."""
    bounds = iteration_ends(records)
    numbers = pd.array([*bounds, None], dtype="Int64")
    lasts = np.maximum.accumulate(np.array([*bounds.values()], np.int64))
    return numbers[np.searchsorted(lasts, sequence, side="left")]


def device_times(records: Records) -> pd.DataFrame:
    """Return the columns sequence, gpu_start_ns and gpu_end_ns of phases and operations with recorded device times."""
    times = records[records["kind"] == kinds.GPU_TIMES]
    gpu = pd.DataFrame({"sequence": times["a"].astype(np.int64), "gpu_start_ns": times["x"], "gpu_end_ns": times["y"]})
    return gpu.astype({"gpu_start_ns": "Int64", "gpu_end_ns": "Int64"}).drop_duplicates("sequence", keep="last")


def read(records: Records) -> pd.DataFrame:
    """Return the table `ops`. Operations on a GPU have the device's times where those were recorded."""
    rows = records[records["kind"] == kinds.OP]
    if not len(rows):
        return empty_frame("ops")
    ops = pd.DataFrame(
        {
            "sequence": rows["a"].astype(np.int64),
            "start_ns": rows["x"],
            "end_ns": rows["y"],
            "resource": [
                _lane(kinds.RESOURCES[code], path) for code, path in zip(rows["c"], rows["small"], strict=True)
            ],
            "name": [kinds.OPS[code] for code in rows["code"]],
            "iteration": iterations(records, rows["a"]),
            "subgroup": _nullable(rows["b"].astype(np.int64), NO_SUBGROUP),
            "bytes": _nullable(rows["w"], MISSING),
            "parent": rows["z"],
        }
    ).merge(device_times(records), on="sequence", how="left")
    for column in ("start_ns", "end_ns"):
        ops[column] = ops.pop(f"gpu_{column}").fillna(ops[column])
    ops = ops.sort_values(["start_ns", "sequence"], ignore_index=True)
    numbers = pd.Series(ops.index, index=ops["sequence"])
    ops["parent"] = ops["parent"].map(numbers[~numbers.index.duplicated()]).astype("Int64")
    return frame("ops", ops)


def select_rows(ops: pd.DataFrame, keep: pd.Series[bool]) -> pd.DataFrame:
    """Return some rows of the table, with new parents; a parent that is not among them becomes missing."""
    rows = ops[keep]
    numbers = pd.Series(range(len(rows)), index=rows.index, dtype="Int64")
    return rows.assign(parent=rows["parent"].map(numbers).astype("Int64")).reset_index(drop=True)


def _lane(resource: str, path: int) -> str:
    """Return the name of a resource, with the number of the path of the storage if that is not the first."""
    has_number = resource.startswith("storage") and path not in (0, kinds.HOST)
    return f"{resource} {path}" if has_number else resource


def _nullable(values: npt.NDArray[Any], missing: int) -> Any:
    nullable = pd.array(values, dtype="Int64")
    nullable[values == missing] = pd.NA
    return nullable
