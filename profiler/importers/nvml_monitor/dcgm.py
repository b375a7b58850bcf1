"""Reads figures of DCGM: scrapes of dcgm-exporter (Prometheus text format), and output of `dcgmi dmon`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd

from ebbtide.profiler.importers.nvml_monitor.dcgm_fields import DMON, DMON_FIELDS, EXPORTER, EXPORTER_FIELDS, is_blank
from ebbtide.profiler.importers.nvml_monitor.line_times import read_time
from ebbtide.profiler.importers.nvml_monitor.table import MonitorTable, Tool, ends_with_line_end, is_cut
from ebbtide.profiler.importers.source import Source, SourceError

_SERIES = re.compile(
    r"^(.{0,64}?)\b(DCGM_FI_\w{1,64}|dcgm_\w{1,64})\{([^{}]{0,4096})\}[ \t]+([-+.\w]{1,64})(?:[ \t]+(\d{1,19}))?\s*$"
)
_EXPORTER_HEAD = re.compile(
    rb"^.{0,64}?(?:# (?:HELP|TYPE) (?:DCGM_FI_|dcgm_)\w|\b(?:DCGM_FI_|dcgm_)\w{1,64}\{)", re.MULTILINE
)
_LABEL = re.compile(r'(\w{1,64})="((?:[^"\\]|\\.){0,1024})"')
_DMON_HEADER = re.compile(r"^(.{0,64}?)#\s?Entity\s+(\S.*)$")
_DMON_ROW = re.compile(r"^(.{0,64}?)\b(GPU|GPU-I|GPU-CI)\s+(\d{1,4})\s+(\S.*)$")
_CUT = "was cut off within its last line, which is left out"
_MIG = "has figures of MIG instances, which are left out"


@dataclass
class _Sample:
    """The figures that were taken of one device at one time."""

    time: str | None
    index: str
    labels: dict[str, str]
    values: dict[str, str] = field(default_factory=dict)


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
    timestamp of its samples, the time before its lines, the last line that is a time.

    Raises:
        SourceError: The file has no figure of a GPU, or figures of several hosts.
    """
    samples: list[_Sample] = []
    notes: list[str] = []
    scrape: dict[str, _Sample] = {}
    seen: set[str] = set()
    written: defaultdict[str, list[str]] = defaultdict(list)
    hosts: set[str] = set()
    time: str | None = None
    match: re.Match[str] | None = None
    for line in _lines(source):
        match = _SERIES.match(line)
        if match is None:
            if (marker := read_time(line)) is not None:
                time, scrape, seen = marker, {}, set()
            continue
        prefix, name, label_text, value, stamp = match.groups()
        labels = dict(_LABEL.findall(label_text)) if name in EXPORTER_FIELDS else {}
        if "gpu" not in labels:
            continue
        if labels.get("GPU_I_ID"):
            notes += [] if _MIG in notes else [_MIG]
            continue
        hosts.add(labels.get("Hostname") or labels.get("hostname") or "")
        written[name].append(f"{value} {stamp or ''}")
        series = f"{name}{{{label_text}}}"
        if series in seen:
            scrape, seen = {}, set()
        seen.add(series)
        sample = scrape.get(labels["gpu"])
        if sample is None:
            sample = scrape[labels["gpu"]] = _Sample(stamp or read_time(prefix) or time, labels["gpu"], labels)
            samples.append(sample)
        if not is_blank(value):
            sample.values.setdefault(EXPORTER_FIELDS[name][0], value)
    if not ends_with_line_end(source):
        name = match.group(2) if match is not None else ""
        if match is None or (name in written and is_cut(written[name][-1], written[name][:-1])):
            notes.append(_CUT)
            if name in written:
                samples[-1].values.pop(EXPORTER_FIELDS[name][0], None)
    if len(hosts) > 1:
        raise SourceError(
            f"{source} has GPUs of several hosts ({', '.join(sorted(hosts)[:5])}): import the lines of each host on "
            "their own, then `ebbtide merge` the traces"
        )
    return _table(source, samples, EXPORTER, notes)


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
            sample = _Sample(read_time(prefix) or time, index, {})
            for short_name, value in zip(fields, values, strict=False):
                name = DMON_FIELDS.get(short_name.upper())
                if name is not None and not is_blank(value):
                    sample.values.setdefault(EXPORTER_FIELDS[name][0], value)
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
    """Yield the lines that are not empty."""
    with source.text() as file:
        yield from (line for line in file if line.strip())


def _table(source: Source, samples: list[_Sample], tool: Tool, notes: list[str]) -> MonitorTable:
    samples = [sample for sample in samples if sample.values]
    if not samples:
        raise SourceError(
            f"{source} has no figure of a GPU: record fields such as DCGM_FI_DEV_FB_USED (252 of dcgmi dmon)"
        )
    units = dict(EXPORTER_FIELDS.values())
    figures = sorted({figure for sample in samples for figure in sample.values})
    labels = {"uuid": "UUID", "name": "modelName", "pci_bus_id": "pci_bus_id"}
    columns: dict[str, list[str | None]] = {"index": [sample.index for sample in samples]}
    if any(sample.time for sample in samples):
        columns["timestamp"] = [sample.time for sample in samples]
    for column, label in labels.items():
        values = [sample.labels.get(label) or sample.labels.get(label.lower()) for sample in samples]
        if any(values):
            columns[column] = values
    columns |= {figure: [sample.values.get(figure) for sample in samples] for figure in figures}
    rows = pd.DataFrame(columns)
    names = list(rows.columns)
    rows.columns = pd.RangeIndex(len(names))
    rows[len(names)] = None
    return MonitorTable(names, [units.get(name, "") for name in names], rows, tool, notes)
