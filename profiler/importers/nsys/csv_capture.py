"""Makes a capture from CSV reports of `nsys stats`: cuda_gpu_trace, cuda_api_trace and those of NVTX ranges."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import IntArray
from ebbtide.profiler.importers.nsys import capture as nsys
from ebbtide.profiler.importers.nsys.capture import Capture
from ebbtide.profiler.importers.source import Source, SourceError

# "Start (ns)", "Start(nsec)", "Bytes (MB)", "Throughput (MB/s)", "Strm"
_COLUMN = re.compile(r"\s*(.*?)\s*(?:[(\[]\s*([^)\]]*?)\s*[)\]])?\s*")
_UNITS = {
    **dict.fromkeys(("ns", "nsec", "nanoseconds"), 1),
    **dict.fromkeys(("us", "usec", "µs", "microseconds"), 10**3),
    **dict.fromkeys(("ms", "msec", "milliseconds"), 10**6),
    **dict.fromkeys(("s", "sec", "seconds"), 10**9),
    **dict.fromkeys(("b", "byte", "bytes"), 1),
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip
# Lines that nsys writes between reports.
_BETWEEN = ("Processing ", "NOTICE", "Generating ", "SKIPPED", " **", "[")
# "[CUDA memcpy HtoD]", "[CUDA memcpy Host-to-Device]", "[CUDA Unified Memory memcpy DtoH]"
_COPY = re.compile(r"\[CUDA (?P<unified>Unified )?.*?memcpy (?:(?P<also>Unified) )?(?P<ends>.*)\]", re.IGNORECASE)
_MEMSET = re.compile(r"\[CUDA memset\]", re.IGNORECASE)
_DIRECTIONS = {
    "htod": nsys.HOST_TO_DEVICE,
    "dtoh": nsys.DEVICE_TO_HOST,
    "htoa": nsys.HOST_TO_DEVICE,
    "atoh": nsys.DEVICE_TO_HOST,
}
# "NVIDIA A100-SXM4-40GB (0)"
_DEVICE = re.compile(r"(.*)\((\d{1,4})\)\s*")
# Unit of sizes in nsys' CSV files, which have three decimals.
_MEGABYTE = 10**6


class ReportKind(Enum):
    """Kind of a report, with the columns by which it is recognized."""

    PROJECTED_RANGES = frozenset({"name", "projected start", "projected duration", "orig start", "orig duration"})
    RANGES = frozenset({"name", "start", "duration", "pid", "tid", "rangeid"})
    CALLS = frozenset({"name", "start", "duration", "corrid", "pid", "tid"})
    WORK = frozenset({"name", "start", "duration", "device", "strm"})


@dataclass(frozen=True)
class Report:
    """One report of a file."""

    kind: ReportKind
    rows: pd.DataFrame  # Its columns by their names in lower case and without unit. Values are as in the file
    units: dict[str, int]  # The factor to ns or bytes of each column that states a unit

    def integers(self, column: str) -> pd.Series:
        """Return a column in ns, bytes or without unit; MISSING where it has no number."""
        if column not in self.rows:
            return pd.Series(nsys.MISSING, self.rows.index, dtype=np.int64)
        values = pd.to_numeric(self.rows[column], errors="coerce")
        unit = self.units.get(column, 1)
        scaled = values * unit if values.dtype == np.int64 else (values * unit).round()
        return (
            scaled.where((scaled >= 0) & (scaled <= nsys.MAX_TIME), nsys.MISSING).fillna(nsys.MISSING).astype(np.int64)
        )

    def texts(self, column: str) -> pd.Series:
        """Return a column of texts; empty where it has none."""
        if column not in self.rows:
            return pd.Series("", self.rows.index, dtype=object)
        values = self.rows[column].astype(object)
        return values.where(values.notna(), "").astype(str)


def has_report(source: Source) -> bool:
    """Return whether the beginning of a file has the header of a report."""
    lines = source.head.decode("utf-8-sig", "replace").splitlines()
    return any(_header(line) is not None for line in lines)


def read_reports_of(source: Source) -> Iterator[Report]:
    """Yield the reports of a file. Raises SourceError if one of them is damaged."""
    with source.text() as file:
        sections = [*_sections(file)]
    for first_line, count, (kind, columns) in sections:
        names = [_parsed_column(column)[0] for column in columns]
        units = {name: _UNITS[unit] for name, unit in map(_parsed_column, columns) if unit in _UNITS}
        try:
            with source.text() as file:
                rows = pd.read_csv(
                    file, skiprows=first_line + 1, nrows=count, header=None, names=names, index_col=False,
                    na_values=["None"], low_memory=False,
                )  # fmt: skip
        except (ValueError, pd.errors.EmptyDataError) as error:
            raise source.damaged(error) from None
        yield Report(kind, rows, units)


def _sections(lines: Iterable[str]) -> Iterator[tuple[int, int, tuple[ReportKind, list[str]]]]:
    """Yield the line of each header, the number of rows below it, and what the header says."""
    header, first_line, count = None, 0, 0
    for number, line in enumerate(lines):
        candidate = _header(line)
        if candidate is not None or not line.strip() or line.startswith(_BETWEEN):
            if header is not None:
                yield first_line, count, header
            header, first_line, count = candidate, number, 0
        else:
            count += 1
    if header is not None:
        yield first_line, count, header


def _header(line: str) -> tuple[ReportKind, list[str]] | None:
    """Return the kind of a report and its columns if a line is the header of one."""
    if "Name" not in line or "Start" not in line or "Duration" not in line:
        return None
    columns = next(csv.reader([line.strip()]), [])
    names = {_parsed_column(column)[0] for column in columns}
    kind = next((kind for kind in ReportKind if kind.value <= names), None)
    return None if kind is None else (kind, columns)


def _parsed_column(column: str) -> tuple[str, str]:
    """Return the name of a column and its unit, both in lower case; the unit is empty if none is stated."""
    name, unit = _COLUMN.fullmatch(column).groups("")  # type: ignore[union-attr]
    return name.lower(), unit.lower()


def read_reports(sources: Sequence[Source]) -> Capture:
    capture = Capture(memory_remedy="the SQLite export has it", ranges_remedy="add the report nvtx_gpu_proj_trace")
    names: dict[str, int] = {}
    parts: dict[ReportKind, list[pd.DataFrame]] = {kind: [] for kind in ReportKind}
    for source in sources:
        for report in read_reports_of(source):
            if report.kind is ReportKind.WORK:
                rows = _work(report, names, capture)
            elif report.kind is ReportKind.CALLS:
                rows = _calls(report, names)
            else:
                rows = _ranges(report, names)
            incomplete = ~nsys.are_spans(rows if "end" in rows else rows.assign(end=rows["start"]))
            if incomplete.any():
                capture.notes.append(f"{int(incomplete.sum())} rows are incomplete and are left out")
            parts[report.kind].append(rows[~incomplete])
    capture.names = [*names]
    capture.work = _joined(parts[ReportKind.WORK], nsys.WORK_COLUMNS)
    nsys.separate_collectives(capture.work, capture.names)
    capture.launches = _joined(parts[ReportKind.CALLS], nsys.LAUNCH_COLUMNS)
    projected = parts[ReportKind.PROJECTED_RANGES]
    # Both kinds of reports have the same ranges: those with device times come first and stay.
    ranges = _joined([*projected, *parts[ReportKind.RANGES]], nsys.RANGE_COLUMNS)
    capture.ranges = ranges.drop_duplicates(["process", "thread", "start", "end", "name"], ignore_index=True)
    if projected:
        gpu_times = ["gpu_start", "gpu_end"]
        capture.ranges[gpu_times] = capture.ranges[gpu_times].fillna(nsys.MISSING).astype(np.int64)
    if capture.work.empty and capture.ranges.empty:
        raise SourceError(
            f"{sources[0]} has no work of a GPU and no NVTX ranges: import `nsys stats --format csv --report "
            "cuda_gpu_trace` or an SQLite export"
        )
    _assign_processes(capture)
    return capture


def _joined(parts: list[pd.DataFrame], columns: tuple[str, ...]) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True) if parts else nsys.integer_frame(columns)


def _numbered(texts: pd.Series, names: dict[str, int]) -> IntArray:
    codes, used = pd.factorize(texts)
    numbers = np.array([names.setdefault(str(text), len(names)) for text in used], np.int64)
    result: IntArray = numbers[codes]
    return result


def _work(report: Report, names: dict[str, int], capture: Capture) -> pd.DataFrame:
    """Return WORK_COLUMNS of a report, and add its devices to the capture."""
    start, texts = report.integers("start"), report.texts("name")
    size_column = next((column for column in ("bytes", "size") if column in report.rows), "bytes")
    if report.units.get(size_column) == _MEGABYTE:
        capture.notes.append("sizes of copies are rounded to 1000 bytes: the SQLite export has them exactly")
    described = pd.DataFrame({"name": texts, "source": report.texts("srcmemkd"), "target": report.texts("dstmemkd")})
    codes, used = pd.factorize(pd.MultiIndex.from_frame(described))
    kinds = [_kind_and_name(*description) for description in used]
    numbers = np.array([names.setdefault(name, len(names)) for _, name in kinds], np.int64)
    device_codes, device_texts = pd.factorize(report.texts("device"))
    devices = []
    for text in device_texts:
        match = _DEVICE.fullmatch(text)
        devices.append(int(match.group(2)) if match else 0)
        if match:
            capture.devices[nsys.MISSING, devices[-1]] = {"name": match.group(1).strip() or None}
    duration = report.integers("duration")
    return pd.DataFrame(
        {
            "process": nsys.MISSING,
            "start": start,
            "end": (start + duration).where(duration >= 0, nsys.MISSING),
            "device": np.array(devices, np.int64)[device_codes],
            "stream": report.integers("strm"),
            "correlation": report.integers("corrid"),
            "kind": np.array([kind for kind, _ in kinds], np.int64)[codes],
            "name": numbers[codes],
            "bytes": report.integers(size_column),
        }
    )


def _kind_and_name(name: str, source: str, target: str) -> tuple[int, str]:
    """Return the kind and name of the work that a row describes by its name and the memories of a copy."""
    if _MEMSET.match(name):
        return nsys.MEMSET, nsys.MEMSET_NAME
    copy = _COPY.match(name)
    if copy is None:
        return nsys.COMPUTE, name
    ends = copy["ends"].lower()
    first, _, last = ends.partition("-to-")
    direction = _DIRECTIONS.get(f"{first[0]}to{last[0]}" if first and last else ends, nsys.ON_DEVICE)
    memory = target if direction == nsys.DEVICE_TO_HOST else source
    unified = bool(copy["unified"] or copy["also"])
    return nsys.copy_kind(direction), nsys.copy_name(
        direction, memory if memory in ("Pinned", "Pageable") else None, unified
    )


def _calls(report: Report, names: dict[str, int]) -> pd.DataFrame:
    """Return LAUNCH_COLUMNS of a report."""
    start = report.integers("start")
    return pd.DataFrame(
        {
            "process": nsys.process_of_pid(report.integers("pid")),
            "correlation": report.integers("corrid"),
            "start": start,
            "end": start + report.integers("duration").clip(lower=0),
            "thread": report.integers("tid"),
            "name": _numbered(report.texts("name"), names),
        }
    )


def _ranges(report: Report, names: dict[str, int]) -> pd.DataFrame:
    """Return RANGE_COLUMNS of a report, and the device times if it has them."""
    projected = report.kind is ReportKind.PROJECTED_RANGES
    # The name of the default domain, before the colon, is empty.
    texts = report.texts("name").str.removeprefix(":")
    start, duration = (
        report.integers(column) for column in (("orig start", "orig duration") if projected else ("start", "duration"))
    )
    columns = {
        "process": nsys.process_of_pid(report.integers("pid")),
        "thread": report.integers("tid"),
        "start": start,
        "end": (start + duration).where(duration >= 0, nsys.MISSING),
        "name": _numbered(texts, names),
    }
    if projected:
        gpu_start, gpu_duration = report.integers("projected start"), report.integers("projected duration")
        columns |= {"gpu_start": gpu_start, "gpu_end": gpu_start + gpu_duration}
        # The report has a row for each process, without a range.
        return pd.DataFrame(columns)[start >= 0]
    return pd.DataFrame(columns)


def _assign_processes(capture: Capture) -> None:
    """Assign work to processes: by the calls that launched it, else by device."""
    work = capture.work
    calls = capture.launches[capture.launches["correlation"] > 0]
    if len(calls):
        # The same number in two processes does not tell which of them launched the work.
        callers = calls.drop_duplicates(["process", "correlation"]).drop_duplicates("correlation", keep=False)
        process = work["correlation"].map(callers.set_index("correlation")["process"])
        capture.work = work.assign(process=process.fillna(nsys.MISSING).astype(np.int64))
        if (capture.work["process"] >= 0).all():
            return
    devices = np.unique(work["device"]).tolist()
    processes = np.unique(pd.concat([capture.ranges["process"], calls["process"]])).tolist()
    if len(processes) == 1:
        capture.work = work.assign(process=processes[0])
        return
    if not devices:
        return
    # Negative numbers stand for processes that are not known.
    assigned = processes if len(processes) == len(devices) else [-2 - device for device in devices]
    capture.work = work.assign(process=work["device"].map(dict(zip(devices, assigned, strict=True))))
    if len(devices) > 1:
        capture.notes.append(
            "it does not say which process did which work, so each device counts as a rank (the report cuda_api_trace "
            "says it)"
        )
    if processes and processes != assigned:
        capture.notes.append(
            f"NVTX ranges of {len(processes)} processes on {len(devices)} devices cannot be assigned: add the report "
            "cuda_api_trace, or import the SQLite export"
        )
