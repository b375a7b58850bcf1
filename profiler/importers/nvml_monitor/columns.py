"""Finds the columns of a monitor file by their names, and converts their values to numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.nvml_monitor.query import TIME
from ebbtide.profiler.importers.nvml_monitor.table import MonitorTable
from ebbtide.profiler.importers.nvml_monitor.times import RowTimes, assume_times, read_times

# The names that such files give to each figure. Those of the state of a GPU are columns of the table `gpu`.
STATE = {
    "utilization_percent": ("utilization.gpu", "gpu_util", "gpu_utilization", "utilization_gpu", "gpu.utilization"),
    "memory_utilization_percent": ("utilization.memory", "mem_util", "memory_util", "memory_utilization"),
    "power_w": ("power.draw.instant", "power.draw", "power.draw.average", "pwr", "power_draw", "power_w", "power"),
    "sm_clock_mhz": ("clocks.current.sm", "clocks.sm", "pclk", "sm_clock", "clocks.gr", "clocks.current.graphics"),
    "memory_clock_mhz": ("clocks.current.memory", "clocks.mem", "mclk", "mem_clock", "memory_clock"),
    "temperature_celsius": ("temperature.gpu", "gtemp", "gpu_temp", "temp", "temperature"),
    "throttle_reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
}
FIGURES = {
    "used": ("memory.used", "mem_used", "memory_used", "fb"),
    "free": ("memory.free", "mem_free", "memory_free"),
    "total": ("memory.total", "mem_total", "memory_total"),
    "processes": ("memory.processes",),
    "h2d": ("rxpci", "rx_pci", "pcie.rx", "pcie_rx", "pcirx"),
    "d2h": ("txpci", "tx_pci", "pcie.tx", "pcie_tx", "pcitx"),
    "generation": ("pcie.link.gen.current", "pcie.link.gen.gpucurrent", "pcie.link.gen"),
    "width": ("pcie.link.width.current", "pcie.link.width"),
    "top_generation": ("pcie.link.gen.max", "pcie.link.gen.gpumax"),
    "top_width": ("pcie.link.width.max",),
    **STATE,
}
_MEMORY, LINK = ("used", "free", "total", "processes"), ("h2d", "d2h")
# A file has something to import if it has a value of one of these.
SAMPLED = ("used", "free", "processes", *LINK, *STATE)
# `index` is the last choice: it may be the index of a data frame.
_DEVICE = ("device_id", "gpu_id", "device", "gpu", "idx", "index")
DEVICE_FIELDS = {
    "name": ("name", "gpu_name"),
    "uuid": ("uuid", "gpu_uuid"),
    "pci_bus_id": ("pci.bus_id", "gpu_bus_id", "pci_bus_id"),
}
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1000, "mb": 10**6, "gb": 10**9}
_MAX_DEVICES = 1024
_MAX_VALUE = 1e15
# Every device uses more bytes than this: memory figures without a unit that stay below are in MiB.
_MIN_USED_BYTES = 1 << 24


def read_figures(table: MonitorTable, columns: dict[str, int | None], notes: list[str]) -> pd.DataFrame:
    """Read the figures of each row.

    Args:
        table: The file.
        columns: Index of the column of each figure in FIGURES; None if the file does not have it.
        notes: Receives a line for each assumption about a unit.

    Returns:
        One column per figure in bytes or bytes/s; NaN for `[N/A]`, `-`, and values that no card has.
    """
    figures = pd.DataFrame(index=table.rows.index)
    for figure, column in columns.items():
        figures[figure] = np.nan
        if column is not None:
            figures[figure] = _numbers(table.text(column))
    for group, default_unit in (_MEMORY, _default_memory_unit(table, columns, figures)), (LINK, 2**20):
        for figure in group:
            column = columns[figure]
            unit = table.units[column].removesuffix("/s") if column is not None else ""
            # The unit that nvidia-smi calls MB of memory is MiB.
            unit = "mib" if unit == "mb" and group == _MEMORY else unit
            figures[figure] *= _UNITS.get(unit, default_unit)
            if column is not None and group == LINK and unit not in _UNITS:
                notes.append("does not state the unit of its PCIe figures: MiB/s is assumed")
    power = columns["power_w"]
    if power is not None and table.units[power] == "mw":
        figures["power_w"] /= 1000
    return figures


def _numbers(texts: pd.Series[str]) -> pd.Series[float]:
    """Return the number at the start of each text, decimal or hexadecimal; NaN for none, and for impossible ones."""
    is_hex = texts.str.fullmatch(r"0x[0-9a-fA-F]{1,16}")
    decimal = texts.where(~is_hex, "").str.extract(r"^(\d[\d.]{0,30}(?:[eE][+-]?\d{1,3})?)", expand=False)
    values = pd.to_numeric(decimal, errors="coerce").astype(float)
    values[is_hex] = [float(int(text, 16)) for text in texts[is_hex]]
    return values.where(values < _MAX_VALUE)


def _default_memory_unit(table: MonitorTable, columns: dict[str, int | None], figures: pd.DataFrame) -> int:
    """Return the unit in bytes of memory figures whose column has none."""
    bare = [m for m in _MEMORY if (column := columns[m]) is not None and table.units[column] not in _UNITS]
    return 2**20 if bare and figures[bare].max(axis=None) < _MIN_USED_BYTES else 1


def read_devices(table: MonitorTable, notes: list[str]) -> pd.Series[float]:
    """Read the number of the device of each row.

    Args:
        table: The file.
        notes: Receives a line if the file does not number its devices.

    Returns:
        The number; NaN for a row without a valid one.
    """
    column = table.column(_DEVICE)
    if column is not None:
        numbers = table.text(column).str.lower().str.extract(r"^(?:cuda:|gpu\s?)?(\d{1,4})(?:\.0)?$", expand=False)
        numbers = pd.to_numeric(numbers, errors="coerce")
        return numbers.where(numbers < _MAX_DEVICES)
    for key in ("pci_bus_id", "uuid"):
        column = table.column(DEVICE_FIELDS[key])
        if column is not None:
            # NVML numbers devices by their bus addresses, and nvidia-smi lists them in that order.
            notes.append(f"identifies devices by {key}: they are numbered in order of appearance")
            identifiers = table.text(column).replace("", np.nan)
            numbers = pd.Series(pd.factorize(identifiers)[0], table.rows.index, dtype=float)
            return numbers.where(numbers.between(0, _MAX_DEVICES - 1))
    notes.append("does not identify devices: all figures are assigned to device 0")
    return pd.Series(0.0, table.rows.index)


def row_times(table: MonitorTable, device: pd.Series[float]) -> RowTimes:
    """Read the time of each row. A time without a zone is read as UTC.

    Args:
        table: The file.
        device: Number of the device of each row.
    """
    if "date" in table.names and "time" in table.names:
        date, time = (table.text(table.names.index(name)) for name in ("date", "time"))
        return read_times(date + " " + time, device)
    column = table.column(TIME)
    return assume_times(device, table.tool.time_hint) if column is None else read_times(table.text(column), device)
