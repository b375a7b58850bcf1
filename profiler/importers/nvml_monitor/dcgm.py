"""Reads figures of DCGM: scrapes of dcgm-exporter (Prometheus text format), and output of `dcgmi dmon`."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pandas as pd

from ebbtide.profiler.importers.nvml_monitor.columns import read_time
from ebbtide.profiler.importers.nvml_monitor.table import MonitorTable, Tool, ends_with_line_end, is_cut
from ebbtide.profiler.importers.source import Source, SourceError

# Name of a field since version 2 of dcgm-exporter, its short name in the header of `dcgmi dmon` (`dcgmi dmon -l`), its
# name in version 1, name and unit of the column here. Sources: dcgm_fields.h and etc/*.csv of dcgm-exporter.
# PROF_PCIE_*_BYTES are means in bytes/s, though early versions call them counters (dcgm-exporter issue 87). TX is data
# that the GPU sends, so device to host.
_FIELDS = (
    ("DCGM_FI_DEV_FB_USED", "FBUSD", "dcgm_fb_used", "memory.used", "mib"),
    ("DCGM_FI_DEV_FB_FREE", "FBFRE", "dcgm_fb_free", "memory.free", "mib"),
    ("DCGM_FI_DEV_FB_TOTAL", "FBTTL", "", "memory.total", "mib"),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "PCIRX", "dcgm_fi_prof_pcie_rx_bytes", "pcie.rx", "b/s"),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "PCITX", "dcgm_fi_prof_pcie_tx_bytes", "pcie.tx", "b/s"),
    ("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", "RXTPT", "dcgm_pcie_rx_throughput", "rxpci", "kb/s"),
    ("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", "TXTPT", "dcgm_pcie_tx_throughput", "txpci", "kb/s"),
    ("DCGM_FI_DEV_PCIE_LINK_GEN", "PCILG", "", "pcie.link.gen.current", ""),
    ("DCGM_FI_DEV_PCIE_LINK_WIDTH", "PCILW", "", "pcie.link.width.current", ""),
    ("DCGM_FI_DEV_PCIE_MAX_LINK_GEN", "PCIMG", "", "pcie.link.gen.max", ""),
    ("DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", "PCIMW", "", "pcie.link.width.max", ""),
    ("DCGM_FI_DEV_GPU_UTIL", "GPUTL", "dcgm_gpu_utilization", "utilization.gpu", "%"),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "MCUTL", "dcgm_mem_copy_utilization", "utilization.memory", "%"),
    ("DCGM_FI_DEV_POWER_USAGE", "POWER", "dcgm_power_usage", "power.draw", "w"),
    ("DCGM_FI_DEV_POWER_USAGE_INSTANT", "POWINST", "", "power.draw.instant", "w"),
    ("DCGM_FI_DEV_SM_CLOCK", "SMCLK", "dcgm_sm_clock", "clocks.sm", "mhz"),
    ("DCGM_FI_DEV_MEM_CLOCK", "MMCLK", "dcgm_memory_clock", "clocks.mem", "mhz"),
    ("DCGM_FI_DEV_GPU_TEMP", "TMPTR", "dcgm_gpu_temp", "temperature.gpu", "c"),
    ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DVCCTR", "", "clocks_throttle_reasons.active", ""),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "", "", "clocks_throttle_reasons.active", ""),
)
EXPORTER_FIELDS = {name: (column, unit) for new, _, old, column, unit in _FIELDS for name in (new, old) if name}
DMON_FIELDS = {short: (column, unit) for _, short, _, column, unit in _FIELDS if short}
EXPORTER = Tool(
    link_source="dcgm",
    link_window_ns=None,
    time_hint="write them with `date +%s` before each scrape, or pipe the scrapes through ts '%Y-%m-%dT%H:%M:%.S'",
    link_hint="the fields DCGM_FI_PROF_PCIE_RX_BYTES and DCGM_FI_PROF_PCIE_TX_BYTES are",
)
DMON = Tool(
    link_source="dcgm",
    link_window_ns=None,
    time_hint="pipe dcgmi dmon through ts '%Y-%m-%dT%H:%M:%.S'",
    link_hint="dcgmi dmon -e 1009,1010 records them",
)
# Values at or above these mean "not supported" and the like (DCGM_INT32_BLANK, DCGM_FP64_BLANK, DCGM_INT64_BLANK).
_INT32_BLANKS = range(0x7FFFFFF0, 0x80000000)
_FP64_BLANK = 2.0**47
# A series, after at most a time that another tool has put before it.
_SERIES = re.compile(r"^(.{0,64}?)\b((?:DCGM_FI_|dcgm_)\w{1,64})\{")
_EXPORTER_HEAD = re.compile(
    rb"^.{0,64}?(?:# (?:HELP|TYPE) (?:DCGM_FI_|dcgm_)\w|\b(?:DCGM_FI_|dcgm_)\w{1,64}\{)", re.MULTILINE
)
_DMON_HEADER = re.compile(r"^(.{0,64}?)#\s?Entity\s+(\S.*)$")
_DMON_ROW = re.compile(r"^(.{0,64}?)\b(GPU|GPU-I|GPU-CI)\s+(\d{1,4})\s+(\S.*)$")
# Columns that describe a device, and the labels that have them.
_LABELS = {"uuid": "UUID", "name": "modelName", "pci_bus_id": "pci_bus_id"}
_CUT = "was cut off within its last line, which is left out"
_MIG = "has figures of MIG instances, which are left out"


def is_blank(value: str) -> bool:
    """Return whether a value is one by which DCGM says that there is none."""
    try:
        number = float(value)
    except ValueError:
        return True
    return not number < _FP64_BLANK or (number.is_integer() and int(number) in _INT32_BLANKS)


# The figures that were taken of one device at one time, by their column.
_Sample = dict[str, str | None]


def looks_like_exporter(source: Source) -> bool:
    """Return whether a file begins with scrapes of dcgm-exporter."""
    return _EXPORTER_HEAD.search(source.head) is not None


def looks_like_dcgmi(source: Source) -> bool:
    """Return whether a file begins with output of `dcgmi dmon`."""
    lines = source.head.decode("utf-8-sig", "replace").splitlines()[:50]
    return any(_DMON_HEADER.match(line) for line in lines)


def read_exporter(source: Source) -> MonitorTable:
    """Read one scrape of dcgm-exporter, or many in a row.

    A scrape ends where a series appears again, or where a line with a time stands. Its time is the first of: the
    timestamp of its samples, the time before its lines, the last line that is a time."""
    samples: list[_Sample] = []
    notes: list[str] = []
    scrape: dict[str, _Sample] = {}
    seen: set[str] = set()
    written: defaultdict[str, list[str]] = defaultdict(list)
    hosts: set[str] = set()
    time: str | None = None
    name = ""
    for line in _lines(source):
        match = _SERIES.match(line)
        name = match[2] if match is not None else ""
        parsed = _parse_series(line[match.start(2) :]) if match is not None and name in EXPORTER_FIELDS else None
        if match is None or (name in EXPORTER_FIELDS and parsed is None):
            name = ""
            if (marker := read_time(line)) is not None:
                time, scrape, seen = marker, {}, set()
            continue
        if parsed is None or "gpu" not in parsed.labels:
            continue
        labels = parsed.labels
        if labels.get("GPU_I_ID"):
            notes += [] if _MIG in notes else [_MIG]
            continue
        hosts.add(labels.get("Hostname") or labels.get("hostname") or "")
        series, _, text = line[match.start(2) :].rpartition("}")
        value, *stamp = text.split()
        written[name].append(text)
        if series in seen:
            scrape, seen = {}, set()
        seen.add(series)
        sample = scrape.get(labels["gpu"])
        if sample is None:
            sample = scrape[labels["gpu"]] = {
                "index": labels["gpu"],
                "timestamp": next(iter(stamp), None) or read_time(match[1]) or time,
                **{column: labels.get(label) or labels.get(label.lower()) for column, label in _LABELS.items()},
            }
            samples.append(sample)
        if not is_blank(value):
            sample.setdefault(EXPORTER_FIELDS[name][0], value)
    is_last_cut = not name or (name in written and is_cut(written[name][-1], written[name][:-1]))
    if is_last_cut and not ends_with_line_end(source):
        notes.append(_CUT)
        if name in written:
            samples[-1].pop(EXPORTER_FIELDS[name][0], None)
    if len(hosts) > 1:
        raise SourceError(
            f"{source} has GPUs of several hosts ({', '.join(sorted(hosts)[:5])}): import the lines of each host on "
            "their own, then `ebbtide import` the traces"
        )
    return _table(source, samples, EXPORTER, notes)


def _parse_series(text: str) -> Any:
    """Return the sample of a series in Prometheus' text format; None where it is damaged."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        return next(iter(text_string_to_metric_families(text))).samples[0]
    except (ValueError, LookupError, StopIteration):
        return None


def read_dcgmi(source: Source) -> MonitorTable:
    """Read output of `dcgmi dmon -e ...`. Raise SourceError if it has no figure of a GPU."""
    samples: list[_Sample] = []
    notes: list[str] = []
    fields: list[str] = []
    written: list[str] = []
    time: str | None = None
    row: re.Match[str] | None = None
    for line in _lines(source):
        row = _DMON_ROW.match(line)
        if header := _DMON_HEADER.match(line):
            fields = header.group(2).split()
        elif row is not None:
            prefix, entity, index, text = row.groups()
            if entity != "GPU":
                notes += [] if _MIG in notes else [_MIG]
                continue
            values = text.split()
            if len(values) < len(fields):
                continue
            written.append(values[-1])
            sample: _Sample = {"index": index, "timestamp": read_time(prefix) or time}
            for short_name, value in zip(fields, values, strict=False):
                field = DMON_FIELDS.get(short_name.upper())
                if field is not None and not is_blank(value):
                    sample.setdefault(field[0], value)
            samples.append(sample)
        else:
            time = read_time(line) or time
    if not ends_with_line_end(source):
        whole = row is not None and len(row.group(4).split()) >= len(fields)
        if not whole or is_cut(written[-1], written[:-1]):
            notes.append(_CUT)
            samples = samples[:-1] if whole else samples
    return _table(source, samples, DMON, notes)


def _lines(source: Source) -> Iterator[str]:
    with source.text() as file:
        yield from (line for line in file if line.strip())


def _table(source: Source, samples: list[_Sample], tool: Tool, notes: list[str]) -> MonitorTable:
    units = dict(EXPORTER_FIELDS.values())
    rows = pd.DataFrame(samples).dropna(axis="columns", how="all")
    figures = [name for name in rows if name in units]
    if not figures:
        raise SourceError(
            f"{source} has no figure of a GPU: record fields such as DCGM_FI_DEV_FB_USED (252 of dcgmi dmon)"
        )
    rows = rows.dropna(subset=figures, how="all").reset_index(drop=True)
    names = [str(name) for name in rows]
    rows.columns = pd.RangeIndex(len(names))
    rows[len(names)] = None
    return MonitorTable(names, [units.get(name, "") for name in names], rows, tool, notes)
