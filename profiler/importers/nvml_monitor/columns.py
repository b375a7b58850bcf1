"""Finds the columns of a monitor file by their names, and converts their values to numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.nvml_monitor.table import TIME, MonitorTable
from ebbtide.profiler.importers.nvml_monitor.times import RowTimes, assume_times, read_times

# The names that such files give to each figure.
FIGURES = {
    "used": ("memory.used", "mem_used", "memory_used", "fb"),
    "free": ("memory.free", "mem_free", "memory_free"),
    "total": ("memory.total", "mem_total", "memory_total"),
    "h2d": ("rxpci", "rx_pci", "pcie.rx", "pcie_rx"),
    "d2h": ("txpci", "tx_pci", "pcie.tx", "pcie_tx"),
    "generation": ("pcie.link.gen.current", "pcie.link.gen.gpucurrent", "pcie.link.gen"),
    "width": ("pcie.link.width.current", "pcie.link.width"),
    "top_generation": ("pcie.link.gen.max", "pcie.link.gen.gpumax"),
    "top_width": ("pcie.link.width.max",),
}
_MEMORY, LINK = ("used", "free", "total"), ("h2d", "d2h")
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
            numbers = table.text(column).str.extract(r"^(\d[\d.]{0,30}(?:[eE][+-]?\d{1,3})?)", expand=False)
            values = pd.to_numeric(numbers, errors="coerce")
            figures[figure] = values.where(values < _MAX_VALUE)
    for group, default_unit in (_MEMORY, _default_memory_unit(table, columns, figures)), (LINK, 2**20):
        for figure in group:
            column = columns[figure]
            unit = table.units[column].removesuffix("/s") if column is not None else ""
            # The unit that nvidia-smi calls MB of memory is MiB.
            unit = "mib" if unit == "mb" and group == _MEMORY else unit
            figures[figure] *= _UNITS.get(unit, default_unit)
            if column is not None and group == LINK and unit not in _UNITS:
                notes.append("does not state the unit of its PCIe figures: MiB/s is assumed")
    return figures


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
    return assume_times(device) if column is None else read_times(table.text(column), device)
