"""Finds the columns of a monitor file by name, and converts values to numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.features.importers.nvml_monitor.dmon import TIME
from ebbtide.features.importers.nvml_monitor.table import MonitorTable

# Digits before the point of a Unix time in s, ms, us and ns (from 2001 to 2286), and
# all digits of one in ns.
_UNIX_DIGITS, _NS_DIGITS = (10, 13, 16, 19), 19
_HALF_DAY_NS = 43_200_000_000_000
_MAX_NS = 1 << 62
_FIRST, _LAST = (
    pd.Timestamp("1990-01-01", tz="UTC"),
    pd.Timestamp("2100-01-01", tz="UTC"),
)
_ISO = (
    r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: "
    r"?(?:Z|UTC|[+-]\d\d:?\d\d))?"
)
_UNIX = r"\d{10}(?:\.\d{1,9})?|\d{13}|\d{16}|\d{19}"
_TIME_OF_DAY = r"\d\d:\d\d:\d\d(?:\.\d{1,9})?"
# The default of `ts` has month and day without a year, so its time of day is all that
# can be used.
_PREFIX = re.compile(
    rf"\[?(?:[A-Z][a-z]{{2}} [ \d]\d )?({_ISO}|{_UNIX}|{_TIME_OF_DAY})\]?:?"
)
# The names that such files give to each figure. The names for the state of a GPU are
# columns of the table `gpu`.
STATE = {
    "utilization_percent": (
        "utilization.gpu",
        "gpu_util",
        "gpu_utilization",
        "utilization_gpu",
        "gpu.utilization",
    ),
    "memory_utilization_percent": (
        "utilization.memory",
        "mem_util",
        "memory_util",
        "memory_utilization",
    ),
    "power_w": (
        "power.draw.instant",
        "power.draw",
        "power.draw.average",
        "pwr",
        "power_draw",
        "power_w",
        "power",
    ),
    "sm_clock_mhz": (
        "clocks.current.sm",
        "clocks.sm",
        "pclk",
        "sm_clock",
        "clocks.gr",
        "clocks.current.graphics",
    ),
    "memory_clock_mhz": (
        "clocks.current.memory",
        "clocks.mem",
        "mclk",
        "mem_clock",
        "memory_clock",
    ),
    "temperature_celsius": (
        "temperature.gpu",
        "gtemp",
        "gpu_temp",
        "temp",
        "temperature",
    ),
    "throttle_reasons": (
        "clocks_event_reasons.active",
        "clocks_throttle_reasons.active",
    ),
}
FIGURES = {
    "used": ("memory.used", "mem_used", "memory_used", "fb"),
    "free": ("memory.free", "mem_free", "memory_free"),
    "total": ("memory.total", "mem_total", "memory_total"),
    "h2d": ("rxpci", "rx_pci", "pcie.rx", "pcie_rx", "pcirx"),
    "d2h": ("txpci", "tx_pci", "pcie.tx", "pcie_tx", "pcitx"),
    "generation": (
        "pcie.link.gen.current",
        "pcie.link.gen.gpucurrent",
        "pcie.link.gen",
    ),
    "width": ("pcie.link.width.current", "pcie.link.width"),
    "top_generation": ("pcie.link.gen.max", "pcie.link.gen.gpumax"),
    "top_width": ("pcie.link.width.max",),
    **STATE,
}
_MEMORY, LINK = ("used", "free", "total"), ("h2d", "d2h")
# A file has something to import if it has a value of one of these.
SAMPLED = ("used", "free", *LINK, *STATE)
# `index` is the last choice: it may be the index of a data frame.
_DEVICE = ("device_id", "gpu_id", "device", "gpu", "idx", "index")
DEVICE_FIELDS = {
    "name": ("name", "gpu_name"),
    "uuid": ("uuid", "gpu_uuid"),
    "pci_bus_id": ("pci.bus_id", "gpu_bus_id", "pci_bus_id"),
}
_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 1000,
    "mb": 10**6,
    "gb": 10**9,
}
_MAX_DEVICES = 1024
_MAX_VALUE = 1e15
# Every device uses more bytes than this: memory figures without a unit that stay below
# are in MiB.
_MIN_USED_BYTES = 1 << 24


@dataclass(frozen=True)
class RowTimes:
    """Times of the rows of a monitor file."""

    ns: pd.Series[Any]  # Int64; `<NA>` for a row without a valid time
    dated: bool  # Whether they are Unix times
    # Assumption that was made about them, to follow the name of the file; None if none
    # was made.
    note: str | None = None


def read_times(stamps: pd.Series[str], device: pd.Series[float]) -> RowTimes:
    """Parse times in the format that most of them have."""
    unix = stamps.str.extract(r"^(\d{10,19})(?:\.(\d{1,9})\d*)?$")
    is_time_of_day = stamps.str.fullmatch(r"\d{1,2}:\d\d:\d\d(?:\.\d{1,9})?")
    unix_share, day_share = unix[0].notna().mean(), is_time_of_day.mean()
    if max(unix_share, day_share) <= 0.5:
        return _read_dates(stamps)
    return (
        _read_unix(unix)
        if unix_share >= day_share
        else _read_times_of_day(stamps.where(is_time_of_day), device)
    )


def assume_times(device: pd.Series[float], hint: str) -> RowTimes:
    """Return times for a file without times: the rows of each device are 1 s apart."""
    ns = device.groupby(device).cumcount() * 1_000_000_000
    note = f"has no times ({hint}): its samples are assumed to be 1 s apart"
    return RowTimes(ns.astype("Int64"), False, note)


def _read_unix(parts: pd.DataFrame) -> RowTimes:
    digits = parts[0].str.len()
    # A line that was cut in its time has fewer digits than the others.
    complete = digits.eq(digits.mode()[0]) & digits.isin(_UNIX_DIGITS)
    ns = (parts[0] + parts[1].fillna("")).str.ljust(_NS_DIGITS, "0").str[:_NS_DIGITS]
    return RowTimes(ns.where(complete & (ns < str(_MAX_NS))).astype("Int64"), True)


def _read_times_of_day(stamps: pd.Series[str], device: pd.Series[float]) -> RowTimes:
    time = pd.to_timedelta(stamps, errors="coerce")
    ns = pd.Series(pd.NA, stamps.index, dtype="Int64")
    valid = time.notna()
    ns[valid] = time[valid].dt.as_unit("ns").astype("int64")
    # The time of day falls back at midnight. The rows of one device may follow the rows
    # of another.
    days = (
        ns[valid]
        .groupby(device[valid])
        .diff()
        .lt(-_HALF_DAY_NS)
        .fillna(False)
        .groupby(device[valid])
        .cumsum()
    )
    ns[valid] += days * 2 * _HALF_DAY_NS
    return RowTimes(
        ns, False, "has times of day without dates (dmon -o DT writes both)"
    )


def _read_dates(stamps: pd.Series[str]) -> RowTimes:
    stamps = stamps.str.replace(
        r"^(\d{4})[/-]?(\d\d)[/-]?(\d\d)[ T]", r"\1-\2-\3 ", regex=True
    )
    parsed = pd.to_datetime(stamps, errors="coerce", format="ISO8601", utc=True)
    valid = parsed.between(_FIRST, _LAST)
    ns = pd.Series(pd.NA, stamps.index, dtype="Int64")
    ns[valid] = parsed[valid].dt.as_unit("ns").astype("int64")
    zoned = stamps[valid].str.contains(r"(?:Z|[+-]\d\d:?\d\d)$").any()
    return RowTimes(
        ns,
        True,
        None if zoned else "has local times without a time zone: they are read as UTC",
    )


def read_time(text: str) -> str | None:
    """Return the time that another tool has put before a line.

    Return None if a text is something else.
    """
    if (match := _PREFIX.fullmatch(text.strip())) is None:
        return None
    return (
        match.group(1)
        .replace("/", "-")
        .replace(",", ".")
        .replace(" UTC", "Z")
        .replace("UTC", "Z")
    )


def read_figures(
    table: MonitorTable, columns: dict[str, int | None], notes: list[str]
) -> pd.DataFrame:
    """Return each figure in bytes or bytes/s, NaN for none.

    `columns` are the columns of FIGURES; None: the file does not have it.
    """
    figures = pd.DataFrame(index=table.rows.index)
    for figure, column in columns.items():
        figures[figure] = np.nan
        if column is not None:
            figures[figure] = _numbers(table.text(column))
    for group, default_unit in (
        (_MEMORY, _default_memory_unit(table, columns, figures)),
        (LINK, 2**20),
    ):
        for figure in group:
            column = columns[figure]
            unit = table.units[column].removesuffix("/s") if column is not None else ""
            # The unit that nvidia-smi calls MB of memory is MiB.
            unit = "mib" if unit == "mb" and group == _MEMORY else unit
            figures[figure] *= _UNITS.get(unit, default_unit)
            if column is not None and group == LINK and unit not in _UNITS:
                notes.append(
                    "does not state the unit of its PCIe figures: MiB/s is assumed"
                )
    power = columns["power_w"]
    if power is not None and table.units[power] == "mw":
        figures["power_w"] /= 1000
    return figures


def _numbers(texts: pd.Series[str]) -> pd.Series[float]:
    """Return the number at the start of each text, decimal or hexadecimal; NaN for
    none, and for impossible ones."""
    is_hex = texts.str.fullmatch(r"0x[0-9a-fA-F]{1,16}")
    decimal = texts.where(~is_hex, "").str.extract(
        r"^(\d[\d.]{0,30}(?:[eE][+-]?\d{1,3})?)", expand=False
    )
    values = pd.to_numeric(decimal, errors="coerce").astype(float)
    values[is_hex] = [float(int(text, 16)) for text in texts[is_hex]]
    return values.where(values < _MAX_VALUE)


def _default_memory_unit(
    table: MonitorTable, columns: dict[str, int | None], figures: pd.DataFrame
) -> int:
    """Return the unit in bytes of memory figures whose column has none."""
    bare = [
        m
        for m in _MEMORY
        if (column := columns[m]) is not None and table.units[column] not in _UNITS
    ]
    return 2**20 if bare and figures[bare].max(axis=None) < _MIN_USED_BYTES else 1


def read_devices(table: MonitorTable, notes: list[str]) -> pd.Series[float]:
    """Return the device number of each row; NaN for a row without a valid one."""
    column = table.column(_DEVICE)
    if column is not None:
        numbers = (
            table.text(column)
            .str.lower()
            .str.extract(r"^(?:cuda:|gpu\s?)?(\d{1,4})(?:\.0)?$", expand=False)
        )
        numbers = pd.to_numeric(numbers, errors="coerce")
        return numbers.where(numbers < _MAX_DEVICES)
    for key in ("pci_bus_id", "uuid"):
        column = table.column(DEVICE_FIELDS[key])
        if column is not None:
            # NVML numbers devices by their bus addresses, and nvidia-smi lists them in
            # that order.
            notes.append(
                f"identifies devices by {key}: they are numbered in order of appearance"
            )
            identifiers = table.text(column).replace("", np.nan)
            numbers = pd.Series(
                pd.factorize(identifiers)[0], table.rows.index, dtype=float
            )
            return numbers.where(numbers.between(0, _MAX_DEVICES - 1))
    notes.append("does not identify devices: all figures are assigned to device 0")
    return pd.Series(0.0, table.rows.index)


def row_times(table: MonitorTable, device: pd.Series[float]) -> RowTimes:
    """Read the time of each row. A time without a zone is read as UTC."""
    if "date" in table.names and "time" in table.names:
        date, time = (table.text(table.names.index(name)) for name in ("date", "time"))
        return read_times(date + " " + time, device)
    column = table.column(TIME)
    return (
        assume_times(device, table.tool.time_hint)
        if column is None
        else read_times(table.text(column), device)
    )
