"""Converts the records of a spool into the tables `phases`, `memory` and `link`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import HOST, MISSING
from ebbtide.profiler.trace import spool_ops
from ebbtide.profiler.trace.micro_steps import micro_steps
from ebbtide.profiler.trace.schema import empty_frame, frame
from ebbtide.profiler.trace.spool_records import Records


def phases_table(records: Records) -> pd.DataFrame:
    """Return phases with their device times, their iteration, and their micro-step within it."""
    rows = records[records["kind"] == kinds.PHASE]
    phases = pd.DataFrame(
        {
            "sequence": rows["a"].astype(np.int64),
            "iteration": spool_ops.iterations(records, rows["a"]),
            "phase": [kinds.PHASES[code] for code in rows["code"]],
            "start_ns": rows["x"],
            "end_ns": rows["y"],
            "micro_batch": rows["b"].astype(np.int64),
            "source": rows["c"].astype(np.int64),
        }
    )
    phases = phases.merge(spool_ops.device_times(records), on="sequence", how="left").sort_values(
        "start_ns", kind="stable", ignore_index=True
    )
    phases["micro_step"] = micro_steps(phases)
    return phases


def memory_table(records: Records, device_names: dict[int, str] | None) -> pd.DataFrame:
    """Return the samples of memory on the rank's devices and the host.

    Args:
        records: Those of the rank's agent or of the sampler.
        device_names: The rank's names of its devices by their NVML number; None: the records have the rank's numbers.
    """
    rows = records[(records["kind"] == kinds.MEMORY) & (records["y"] != MISSING)]
    table = pd.DataFrame(
        {
            "t_ns": rows["x"],
            "device": _devices(rows["small"], device_names),
            "pool": pd.Categorical.from_codes(rows["code"].astype(int), list(kinds.POOLS)).astype(str),
            "bytes": rows["y"],
        }
    )
    return table[table["device"].notna()]


def link_table(records: Records, device_names: dict[int, str]) -> pd.DataFrame:
    """Return the table `link` of the rank's devices. device_names: as in `memory_table`."""
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
    table: dict[int, str | None] = {}
    for number in np.unique(numbers).tolist():
        name = f"cuda:{number}" if names is None else names.get(number)
        table[number] = "cpu" if number == HOST else name
    return pd.Series(numbers.astype(int)).map(table)
