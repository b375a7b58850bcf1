"""Converts a spool into the tables `phases`, `memory`, `link`, `gpu` and `ops`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import HOST, MISSING, NO_SUBGROUP
from ebbtide.profiler.recording.spools.records import Records, iteration_ends
from ebbtide.profiler.trace.frames import empty_frame, frame
from ebbtide.profiler.trace.iterations import micro_steps

# The column of each quantity, and how many units of the record make one of the column.
_COLUMNS: dict[str, tuple[str, float | None]] = {
    "utilization": ("utilization_percent", 1.0),
    "memory_utilization": ("memory_utilization_percent", 1.0),
    "power": ("power_w", 1e3),
    "sm_clock": ("sm_clock_mhz", 1.0),
    "memory_clock": ("memory_clock_mhz", 1.0),
    "temperature": ("temperature_celsius", 1.0),
    "throttle_reasons": ("throttle_reasons", None),
}


def phases_table(records: Records) -> pd.DataFrame:
    """Return phases with device times, their iteration, and their micro-step in it."""
    rows = records[records["kind"] == kinds.PHASE]
    phases = pd.DataFrame(
        {
            "sequence": rows["a"].astype(np.int64),
            "iteration": iterations(records, rows["a"]),
            "phase": [kinds.PHASES[code] for code in rows["code"]],
            "start_ns": rows["x"],
            "end_ns": rows["y"],
            "micro_batch": rows["b"].astype(np.int64),
            "source": rows["c"].astype(np.int64),
        }
    )
    phases = phases.merge(device_times(records), on="sequence", how="left").sort_values(
        "start_ns", kind="stable", ignore_index=True
    )
    phases["micro_step"] = micro_steps(phases)
    return phases


def memory_table(records: Records, device_names: dict[int, str] | None) -> pd.DataFrame:
    """Return the samples of memory.

    `device_names` are by NVML number; None: the records have the rank's numbers.
    """
    rows = records[(records["kind"] == kinds.MEMORY) & (records["y"] != MISSING)]
    table = pd.DataFrame(
        {
            "t_ns": rows["x"],
            "device": _devices(rows["small"], device_names),
            "pool": pd.Categorical.from_codes(
                rows["code"].astype(int), list(kinds.POOLS)
            ).astype(str),
            "bytes": rows["y"],
        }
    )
    return table[table["device"].notna()]


def link_table(records: Records, device_names: dict[int, str]) -> pd.DataFrame:
    """Return the table `link` of the rank's devices.

    device_names: as in `memory_table`.
    """
    rows = records[records["kind"] == kinds.LINK]
    if not len(rows):
        return empty_frame("link")
    table = pd.DataFrame(
        {
            "t_ns": rows["x"],
            "device": _devices(rows["small"], device_names),
            "h2d_bytes_per_s": np.where(rows["y"] == MISSING, np.nan, rows["y"]),
            "d2h_bytes_per_s": np.where(rows["z"] == MISSING, np.nan, rows["z"]),
            "source": [kinds.LINK_SOURCES[code] for code in rows["code"]],
            "window_ns": rows["w"],
            "generation": pd.array(rows["a"], dtype="Int64"),
            "width": pd.array(rows["b"], dtype="Int64"),
        }
    )
    for column in ("generation", "width"):
        table[column] = table[column].where(table[column] != 0)
    return frame("link", table[table["device"].notna()])


def _devices(numbers: npt.NDArray[Any], names: dict[int, str] | None) -> pd.Series[Any]:
    if names is None:
        names = {number: f"cuda:{number}" for number in np.unique(numbers).tolist()}
    return pd.Series(numbers.astype(int)).map({**names, HOST: "cpu"})


def gpu_table(records: Records, device_names: dict[int, str]) -> pd.DataFrame:
    """Return the table `gpu`: a row for values that were read together.

    `device_names` are by NVML number.
    """
    rows = records[(records["kind"] == kinds.GPU_STATE) & (records["y"] != MISSING)]
    if not len(rows):
        return empty_frame("gpu")
    samples = pd.DataFrame(
        {
            "t_ns": rows["x"],
            "number": rows["small"],
            "code": rows["code"],
            "value": rows["y"],
        }
    )
    samples["device"] = samples.pop("number").astype("int64").map(device_names)
    samples = samples[samples["device"].notna()].drop_duplicates(
        ["t_ns", "device", "code"], keep="last"
    )
    if samples.empty:
        return empty_frame("gpu")
    wide = (
        samples.set_index(["t_ns", "device", "code"])["value"]
        .astype("Int64")
        .unstack("code")
    )
    columns = {}
    for code, quantity in enumerate(kinds.GPU_QUANTITIES):
        if code in wide:
            column, units = _COLUMNS[quantity]
            columns[column] = (
                wide[code]
                if units is None
                else wide[code].astype("Float64").astype("float64") / units
            )
    return frame("gpu", pd.DataFrame(columns).reset_index())


def iterations(records: Records, sequence: npt.NDArray[Any]) -> Any:
    """Return the iteration of each phase or operation by sequence number; missing where
    no iteration ended after it."""
    bounds = iteration_ends(records)
    numbers = pd.array([*bounds, None], dtype="Int64")
    lasts = np.maximum.accumulate(np.array([*bounds.values()], np.int64))
    return numbers[np.searchsorted(lasts, sequence, side="left")]


def device_times(records: Records) -> pd.DataFrame:
    """Return the recorded device times of phases and operations.

    The columns are sequence, gpu_start_ns and gpu_end_ns.
    """
    times = records[records["kind"] == kinds.GPU_TIMES]
    gpu = pd.DataFrame(
        {
            "sequence": times["a"].astype(np.int64),
            "gpu_start_ns": times["x"],
            "gpu_end_ns": times["y"],
        }
    )
    return gpu.astype({"gpu_start_ns": "Int64", "gpu_end_ns": "Int64"}).drop_duplicates(
        "sequence", keep="last"
    )


def ops_table(records: Records) -> pd.DataFrame:
    """Return the table `ops`. Operations on a GPU have the device's times where those
    were recorded."""
    rows = records[records["kind"] == kinds.OP]
    if not len(rows):
        return empty_frame("ops")
    ops = pd.DataFrame(
        {
            "sequence": rows["a"].astype(np.int64),
            "start_ns": rows["x"],
            "end_ns": rows["y"],
            "resource": [
                _lane(kinds.RESOURCES[code], path)
                for code, path in zip(rows["c"], rows["small"], strict=True)
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
    ops["parent"] = (
        ops["parent"].map(numbers[~numbers.index.duplicated()]).astype("Int64")
    )
    return frame("ops", ops)


def marks_table(records: Records) -> pd.DataFrame:
    """Return the ranges that the job names, with device times where recorded."""
    rows = records[records["kind"] == kinds.MARK]
    if not len(rows):
        return empty_frame("marks")
    names = _mark_names(records)
    marks = pd.DataFrame(
        {
            "sequence": rows["a"].astype(np.int64),
            "start_ns": rows["x"],
            "end_ns": rows["y"],
            "name": [names.get(number, "") for number in rows["b"].tolist()],
            "thread": rows["w"],
        }
    ).merge(device_times(records), on="sequence", how="left")
    return frame("marks", marks.sort_values(["start_ns", "sequence"]))


def _mark_names(records: Records) -> dict[int, str]:
    rows = records[records["kind"] == kinds.MARK_NAME]
    names: dict[int, bytes] = {}
    for row in rows:
        words = (int(row[field]) for field in "wxyz")
        chunk = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
        number = int(row["a"])
        names[number] = names.get(number, b"") + chunk
    return {
        number: text.rstrip(b"\0").decode(errors="replace")
        for number, text in names.items()
    }


def select_rows(ops: pd.DataFrame, keep: pd.Series[bool]) -> pd.DataFrame:
    """Return some rows of the table, with new parents.

    A parent that is not among them becomes missing.
    """
    rows = ops[keep]
    numbers = pd.Series(range(len(rows)), index=rows.index, dtype="Int64")
    return rows.assign(parent=rows["parent"].map(numbers).astype("Int64")).reset_index(
        drop=True
    )


def _lane(resource: str, path: int) -> str:
    """Return the name of a resource, with the number of the path of the storage if that
    is not the first."""
    has_number = resource.startswith("storage") and path not in (0, kinds.HOST)
    return f"{resource} {path}" if has_number else resource


def _nullable(values: npt.NDArray[Any], missing: int) -> Any:
    nullable = pd.array(values, dtype="Int64")
    nullable[values == missing] = pd.NA
    return nullable
