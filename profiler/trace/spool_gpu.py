"""Converts the records of a sampler's spool into the table `gpu`."""

from __future__ import annotations

import pandas as pd

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import MISSING
from ebbtide.profiler.trace.schema import empty_frame, frame
from ebbtide.profiler.trace.spool_records import Records

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


def gpu_table(records: Records, device_names: dict[int, str]) -> pd.DataFrame:
    """Return the table `gpu` of the rank's devices.

    Values that were read together have one time, and make one row.

    Args:
        records: Those of the sampler.
        device_names: The rank's names of its devices by their NVML number.
    """
    rows = records[(records["kind"] == kinds.GPU_STATE) & (records["y"] != MISSING)]
    if not len(rows):
        return empty_frame("gpu")
    samples = pd.DataFrame({"t_ns": rows["x"], "number": rows["small"], "code": rows["code"], "value": rows["y"]})
    samples["device"] = samples.pop("number").astype("int64").map(device_names)
    samples = samples[samples["device"].notna()].drop_duplicates(["t_ns", "device", "code"], keep="last")
    if samples.empty:
        return empty_frame("gpu")
    wide = samples.set_index(["t_ns", "device", "code"])["value"].astype("Int64").unstack("code")
    columns = {}
    for code, quantity in enumerate(kinds.GPU_QUANTITIES):
        if code in wide:
            column, units = _COLUMNS[quantity]
            columns[column] = wide[code] if units is None else wide[code].astype("Float64").astype("float64") / units
    return frame("gpu", pd.DataFrame(columns).reset_index())
