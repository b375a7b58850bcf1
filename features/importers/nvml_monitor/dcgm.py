"""Reads output of `dcgmi dmon`."""

import re

import pandas as pd

from ebbtide.features.importers.nvml_monitor.columns import read_time
from ebbtide.features.importers.nvml_monitor.table import (
    MonitorTable,
    Tool,
    ends_with_line_end,
    is_cut,
)
from ebbtide.features.importers.source import Source, SourceError

# Short name of a field in the header (`dcgmi dmon -l`), name and unit of the column
# here. Source: dcgm_fields.h. TX is data that the GPU sends, so device to host.
_FIELDS = {
    "FBUSD": ("memory.used", "mib"),
    "FBFRE": ("memory.free", "mib"),
    "FBTTL": ("memory.total", "mib"),
    "PCIRX": ("pcie.rx", "b/s"),
    "PCITX": ("pcie.tx", "b/s"),
    "RXTPT": ("rxpci", "kb/s"),
    "TXTPT": ("txpci", "kb/s"),
    "PCILG": ("pcie.link.gen.current", ""),
    "PCILW": ("pcie.link.width.current", ""),
    "PCIMG": ("pcie.link.gen.max", ""),
    "PCIMW": ("pcie.link.width.max", ""),
    "GPUTL": ("utilization.gpu", "%"),
    "MCUTL": ("utilization.memory", "%"),
    "POWER": ("power.draw", "w"),
    "POWINST": ("power.draw.instant", "w"),
    "SMCLK": ("clocks.sm", "mhz"),
    "MMCLK": ("clocks.mem", "mhz"),
    "TMPTR": ("temperature.gpu", "c"),
    "DVCCTR": ("clocks_throttle_reasons.active", ""),
}
_TOOL = Tool(
    link_source="dcgm",
    link_window_ns=None,
    time_hint="pipe dcgmi dmon through ts '%Y-%m-%dT%H:%M:%.S'",
    link_hint="dcgmi dmon -e 1009,1010 records them",
)
# Values at or above these mean "not supported" and the like (DCGM_INT32_BLANK,
# DCGM_FP64_BLANK, DCGM_INT64_BLANK).
_INT32_BLANKS = range(0x7FFFFFF0, 0x80000000)
_FP64_BLANK = 2.0**47
# A header and a row, after at most a time that another tool has put before it.
_HEADER = re.compile(r"^(.{0,64}?)#\s?Entity\s+(\S.*)$")
_ROW = re.compile(r"^(.{0,64}?)\b(GPU|GPU-I|GPU-CI)\s+(\d{1,4})\s+(\S.*)$")


def is_blank(value: str) -> bool:
    """Return whether a value is one by which DCGM says that there is none."""
    try:
        number = float(value)
    except ValueError:
        return True
    return not number < _FP64_BLANK or (
        number.is_integer() and int(number) in _INT32_BLANKS
    )


def looks_like_dcgmi(source: Source) -> bool:
    """Return whether a file begins with output of `dcgmi dmon`."""
    lines = source.head_text.splitlines()[:50]
    return any(_HEADER.match(line) for line in lines)


def read_dcgmi(source: Source) -> MonitorTable:
    """Read output of `dcgmi dmon -e ...`. Raise SourceError if it has no figure of a
    GPU."""
    samples: list[dict[str, str | None]] = []
    has_mig = was_cut = False
    fields: list[str] = []
    written: list[str] = []
    row: re.Match[str] | None = None
    with source.text() as file:
        for line in filter(str.strip, file):
            row = _ROW.match(line)
            if header := _HEADER.match(line):
                fields = header.group(2).split()
            if row is None:
                continue
            prefix, entity, index, text = row.groups()
            values = text.split()
            if entity != "GPU":
                has_mig = True
            elif len(values) >= len(fields):
                written.append(values[-1])
                named = zip(fields, values, strict=False)
                figures = {
                    _FIELDS[name.upper()][0]: value
                    for name, value in named
                    if name.upper() in _FIELDS
                }
                figures = {
                    column: value
                    for column, value in figures.items()
                    if not is_blank(value)
                }
                samples.append(
                    {"index": index, "timestamp": read_time(prefix), **figures}
                )
    if not ends_with_line_end(source):
        whole = row is not None and len(row.group(4).split()) >= len(fields)
        was_cut = not whole or is_cut(written[-1], written[:-1])
        samples = samples[:-1] if whole and was_cut else samples
    notes = ["has figures of MIG instances, which are left out"] if has_mig else []
    notes += ["was cut off within its last line, which is left out"] if was_cut else []
    return _table(source, pd.DataFrame(samples), notes)


def _table(source: Source, rows: pd.DataFrame, notes: list[str]) -> MonitorTable:
    units = dict(_FIELDS.values())
    rows = rows.dropna(axis="columns", how="all")
    figures = [name for name in rows if name in units]
    if not figures:
        raise SourceError(
            f"{source} has no figure of a GPU: record fields such as 252, the used "
            "memory"
        )
    rows = rows.dropna(subset=figures, how="all").reset_index(drop=True)
    names = [str(name) for name in rows]
    rows.columns = pd.RangeIndex(len(names))
    rows[len(names)] = None
    return MonitorTable(
        names, [units.get(name, "") for name in names], rows, _TOOL, notes
    )
