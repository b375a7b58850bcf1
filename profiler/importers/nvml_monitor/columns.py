"""What each column of a monitor file means, and the figures in it."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.nvml_monitor.table import TIME, Table
from ebbtide.profiler.importers.nvml_monitor.times import Times, apart, read_times

# Which column says what, by the names that such files use. A column called `index` may be that of a data frame.
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
_DEVICE = ("device_id", "gpu_id", "device", "gpu", "idx", "index")
FACTS = {
    "name": ("name", "gpu_name"),
    "uuid": ("uuid", "gpu_uuid"),
    "pci_bus_id": ("pci.bus_id", "gpu_bus_id", "pci_bus_id"),
}
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1000, "mb": 10**6, "gb": 10**9}
_MOST_DEVICES = 1024
# No device uses so little: figures that stay below are in MiB.
_LEAST_BYTES = 1 << 24


def read_figures(table: Table, columns: dict[str, int | None], notes: list[str]) -> pd.DataFrame:
    """bytes and bytes/s; NaN for `[N/A]`, `-`, and what no card has."""
    figures = pd.DataFrame(index=table.rows.index)
    for meaning, column in columns.items():
        figures[meaning] = np.nan
        if column is not None:
            numbers = table.text(column).str.extract(r"^(\d[\d.]{0,30}(?:[eE][+-]?\d{1,3})?)", expand=False)
            values = pd.to_numeric(numbers, errors="coerce")
            figures[meaning] = values.where(values < 1e15)
    for meanings, bare in (_MEMORY, _bare_memory_unit(table, columns, figures)), (LINK, 2**20):
        for meaning in meanings:
            column = columns[meaning]
            unit = table.units[column].removesuffix("/s") if column is not None else ""
            # nvidia-smi's MB of memory are MiB.
            unit = "mib" if unit == "mb" and meanings == _MEMORY else unit
            figures[meaning] *= _UNITS.get(unit, bare)
            if column is not None and meanings == LINK and unit not in _UNITS:
                notes.append("does not tell the unit of its PCIe figures: they are taken as MiB/s")
    return figures


def _bare_memory_unit(table: Table, columns: dict[str, int | None], figures: pd.DataFrame) -> int:
    bare = [m for m in _MEMORY if (column := columns[m]) is not None and table.units[column] not in _UNITS]
    return 2**20 if bare and figures[bare].max(axis=None) < _LEAST_BYTES else 1


def read_devices(table: Table, notes: list[str]) -> pd.Series[float]:
    column = table.column(_DEVICE)
    if column is not None:
        numbers = table.text(column).str.lower().str.extract(r"^(?:cuda:|gpu\s?)?(\d{1,4})(?:\.0)?$", expand=False)
        numbers = pd.to_numeric(numbers, errors="coerce")
        return numbers.where(numbers < _MOST_DEVICES)
    for key in ("pci_bus_id", "uuid"):
        column = table.column(FACTS[key])
        if column is not None:
            # NVML numbers devices by their bus addresses, and nvidia-smi lists them in that order.
            notes.append(f"tells devices by their {key}: they are numbered in the order in which they come")
            named = table.text(column).replace("", np.nan)
            numbers = pd.Series(pd.factorize(named)[0], table.rows.index, dtype=float)
            return numbers.where(numbers.between(0, _MOST_DEVICES - 1))
    notes.append("does not tell devices apart: its figures are taken as those of device 0")
    return pd.Series(0.0, table.rows.index)


def row_times(table: Table, device: pd.Series[float]) -> Times:
    """A time without a zone is taken as UTC."""
    if "date" in table.names and "time" in table.names:
        date, time = (table.text(table.names.index(name)) for name in ("date", "time"))
        return read_times(date + " " + time, device)
    column = table.column(TIME)
    return apart(device) if column is None else read_times(table.text(column), device)
