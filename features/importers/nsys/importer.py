"""Imports SQLite exports of Nsight Systems."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ebbtide.features.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.features.importers.kineto.phases import (
    NO_LAUNCHES,
    DeviceTimes,
    no_launches,
)
from ebbtide.features.importers.nsys.database import MAGIC, open_database
from ebbtide.features.importers.nsys.phases import RangeNames, phases_of
from ebbtide.features.importers.nsys.sqlite_capture import (
    EXPORT_TABLES,
    MISSING,
    Capture,
    pid_of,
    read_capture,
)
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.phases import BACKWARD, FORWARD, UPDATE
from ebbtide.profiler.chrome_trace.gpu_activities import (
    NO_TIME,
    TRANSFER,
    kernel_columns,
    transfer_columns,
    without_empty,
)
from ebbtide.profiler.chrome_trace.host_calls import (
    call_columns,
    kept_calls,
    with_launches,
)
from ebbtide.profiler.chrome_trace.host_ranges import operators
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from ebbtide.units import bytes_text

# Recordings, before they are exported: their format is not public.
_RECORDINGS = (".nsys-rep", ".qdrep", ".qdstrm")
# The header of a CSV report of `nsys stats`, which makes an SQLite export first.
_REPORT = re.compile(
    rb"^(?=.{0,400}Start ?\(ns)(?=.{0,400}Duration ?\(ns).{0,400}\bName\b", re.MULTILINE
)
_RANK = re.compile(r"rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
# Names of ranges that a note shows.
_SHOWN_NAMES = 5
# No host has this many processes that use GPUs.
_MAX_RANKS = 4096
# As for torch.profiler: a trace with more would grow by what nobody reads one by one.
_MAX_RANGES = 200_000
# Memory that the process allocated through CUDA; docs/trace-format.md describes all
# pools.
POOL = "cuda"


class NsysImporter:
    """Importer of the files that `nsys export --type sqlite` writes."""

    format = "nsys"
    recognition = Recognition.MAGIC_BYTES
    stage = Stage.PROFILE

    def matches(self, source: Source) -> bool:
        is_recording = (
            source.path.suffix in _RECORDINGS or _REPORT.search(source.head) is not None
        )
        return source.head.startswith(MAGIC) or is_recording

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        undated = []
        for source in sources:
            if _REPORT.search(source.head):
                raise SourceError(
                    f"{source} is a report of `nsys stats`: import the SQLite export "
                    "that it was made from, which "
                    "`nsys export --type sqlite` makes, too"
                )
            if not source.head.startswith(MAGIC):
                export = source.path.with_suffix(".sqlite")
                raise SourceError(
                    f"{source} is not an SQLite export: run `nsys export --type sqlite "
                    f"-o {export} {source}`, and "
                    f"import {export}"
                )
            with open_database(source) as database:
                if not any(table in database.tables for table in EXPORT_TABLES):
                    raise SourceError(
                        f"{source} is an SQLite database, but not an export of Nsight "
                        "Systems"
                    )
                capture = read_capture(database)
            if capture.work.empty and capture.ranges.empty:
                raise SourceError(
                    f"{source} has neither work of a GPU nor NVTX ranges (nsys profile "
                    "--trace=cuda,nvtx)"
                )
            add_capture(builder, capture, source, options)
            if capture.session_ns is None:
                undated.append(source)
        return undated


def add_capture(
    builder: TraceBuilder, capture: Capture, source: Source, options: ImportOptions
) -> None:
    """Add the contents of a capture, a file or several that belong together, to the
    ranks of a trace."""
    names = RangeNames(options.phases)
    processes = _processes(capture, source)
    notes = list(capture.notes)
    if len(processes) > 1:
        order = (
            "the ranks of MPI"
            if set(processes) <= set(capture.ranks)
            else "in the order of their GPUs"
        )
        pids = ", ".join(str(pid_of(process)) for process in processes)
        notes.append(
            f"{len(processes)} processes used a GPU and are ranks ({order}): {pids}"
        )
    for process in processes:
        entry = _entry(builder, capture, source, process, alone=len(processes) == 1)
        _Rank(entry, capture, process, names, notes).add()
    notes += [
        f"--phase: no NVTX range has the name {name!r}" for name in sorted(names.unused)
    ]
    for note in dict.fromkeys(notes):
        builder.note(f"{source.path.name}: {note}")


def _processes(capture: Capture, source: Source) -> list[int]:
    """Return the ranks' processes in order: those that used a GPU, or, if none did,
    those that have ranges."""
    rows = capture.work if len(capture.work) else capture.ranges.assign(device=0)
    first_device = rows.groupby("process")["device"].min()
    if len(first_device) > _MAX_RANKS:
        raise source.damaged(f"{len(first_device)} processes used a GPU")

    def position(process: int) -> tuple[int, int, int]:
        device = int(first_device[process])
        index = _device(capture, process, device).get("index", device)
        return capture.ranks.get(process, len(capture.ranks) + 1), index, process

    return sorted(map(int, first_device.index), key=position)


def _entry(
    builder: TraceBuilder, capture: Capture, source: Source, process: int, alone: bool
) -> RankBuilder:
    """Return the builder of a process's rank.

    The rank is MPI's, else the one in the file's name, else the next free one.
    """
    in_name = _RANK.search(source.path.name) if alone else None
    rank = capture.ranks.get(process, int(in_name.group(1)) if in_name else None)
    if rank is None:
        rank = next(
            n
            for n in range(len(builder.ranks) + 1)
            if "imported_from" not in _meta(builder, n)
        )
    imported_from = _meta(builder, rank).get("imported_from")
    if imported_from is not None:
        raise SourceError(
            f"{imported_from} and {source} are both of rank {rank}: import one file "
            "per rank"
        )
    entry = builder.rank(rank, imported_from=source.path.name)
    pid = pid_of(process)
    if pid is not None:
        entry.meta["pid"] = pid
    return entry


def _meta(builder: TraceBuilder, rank: int) -> dict[str, Any]:
    return builder.ranks[rank].meta if rank in builder.ranks else {}


def _device(capture: Capture, process: int, number: int) -> dict[str, Any]:
    """Return what the file states of a device.

    The device is given by its number in the process.
    """
    own = capture.devices.get((pid_of(process) or MISSING, number))
    return own or capture.devices.get((MISSING, number), {})


class _Rank:
    """Adds one process to its rank."""

    def __init__(
        self,
        entry: RankBuilder,
        capture: Capture,
        process: int,
        names: RangeNames,
        notes: list[str],
    ) -> None:
        self._entry, self._capture, self._process = entry, capture, process
        self._names, self._notes = names, notes
        self._base_ns = capture.session_ns or 0
        self._calls = capture.launches[capture.launches["process"] == process]
        work, empty = without_empty(capture.work[capture.work["process"] == process])
        if empty:
            notes.append(NO_TIME.format(empty))
        self._work = with_launches(
            work, self._calls.sort_values("start", kind="stable")
        )
        self._ranges = capture.ranges[capture.ranges["process"] == process].sort_values(
            "start", kind="stable"
        )

    def add(self) -> None:
        """Add all tables."""
        self._add_work()
        self._add_devices()
        self._add_memory()
        self._add_phases()
        self._add_annotations()

    def _add_work(self) -> None:
        if self._work.empty:
            self._notes.append(
                "it has no work of a GPU, so no kernels and no copies (nsys profile "
                "--trace=cuda,nvtx)"
            )
            return
        self._entry.meta["transfers_recorded"] = True
        launched_by = operators(self._work, self._ranges, self._capture.names)
        columns = kernel_columns(self._work, self._capture.names, self._base_ns)
        self._entry.extend("kernels", **columns, operator=launched_by)
        self._entry.extend(
            "transfers",
            **transfer_columns(self._work, self._capture.names, self._base_ns),
        )
        calls = kept_calls(self._calls, self._capture.names, self._work["correlation"])
        self._entry.extend(
            "calls", **call_columns(calls, self._capture.names, self._base_ns)
        )
        if not self._work["kind"].eq(TRANSFER).any():
            self._notes.append("it has no copy between host and device")

    def _add_devices(self) -> None:
        """Add the devices that the process used, the busiest first."""
        busy = (
            (self._work["end"] - self._work["start"])
            .groupby(self._work["device"])
            .sum()
        )
        numbers = [
            int(number)
            for number in busy.sort_values(ascending=False, kind="stable").index
        ]
        entries = []
        for number in numbers or [0]:
            details = {
                k: v
                for k, v in _device(self._capture, self._process, number).items()
                if k != "index"
            }
            entries.append({"device": f"cuda:{number}", "kind": "cuda", **details})
        own = {entry["device"] for entry in entries}
        self._entry.meta["devices"] = entries + [
            d for d in self._entry.meta["devices"] if d["device"] not in own
        ]

    def _add_memory(self) -> None:
        recorded = self._capture.memory
        if recorded is None:
            self._notes.append(
                "it has no use of GPU memory (nsys profile --cuda-memory-usage=true)"
            )
            return
        earlier = 0
        for number, rows in recorded[recorded["process"] == self._process].groupby(
            "device"
        ):
            sizes, before = held_bytes(
                rows, int(min(rows["t"].min(), self._work["start"].min()))
            )
            earlier += before
            columns = {"t_ns": sizes["t"] + self._base_ns, "bytes": sizes["bytes"]}
            self._entry.extend("memory", **columns, device=f"cuda:{number}", pool=POOL)
        if earlier:
            self._notes.append(
                f"{bytes_text(earlier)} of GPU memory were allocated before the "
                "recording and released in it: they "
                "count from its start; what was allocated before and never released is "
                "not known"
            )

    def _add_phases(self) -> None:
        if not self._entry.frame("phases").empty:
            self._notes.append(
                "its phases are left out: another file has phases of this rank"
            )
            return
        derived = phases_of(self._ranges, self._capture.names, self._names, self._notes)
        table = derived.phases
        self._note_missing(table)
        if no_launches(self._work) and len(table):
            self._notes.append(NO_LAUNCHES)
        times = DeviceTimes(self._work)
        derived.add_to(
            self._entry, times.times(table), times.ends(derived.steps), self._base_ns
        )

    def _note_missing(self, phases: pd.DataFrame) -> None:
        """Add a note on phases that no range names, with the names that there are."""
        missing = [
            phase
            for phase in (FORWARD, BACKWARD, UPDATE)
            if not phases["phase"].eq(phase).any()
        ]
        if self._ranges.empty:
            self._notes.append(
                "it has no NVTX ranges, so no phases (nsys profile --trace=cuda,nvtx; "
                "the job marks them with "
                'torch.cuda.nvtx.range("forward"), ("backward") and ("optimizer"))'
            )
        elif missing:
            counts = self._ranges["name"].value_counts().index[:_SHOWN_NAMES]
            shown = ", ".join(repr(self._capture.names[number]) for number in counts)
            self._notes.append(
                f"no NVTX range names {' or '.join(missing)}: --phase "
                f"NAME={missing[0]} assigns ranges (most frequent: "
                f"{shown})"
            )
        elif phases["iteration"].isna().all():
            self._notes.append(
                "no NVTX range marks iterations or updates: --phase NAME=iteration "
                "assigns ranges"
            )

    def _add_annotations(self) -> None:
        if len(self._ranges) > _MAX_RANGES:
            count = len(self._ranges)
            self._notes.append(
                f"its {count:,} NVTX ranges are left out: a trace keeps up to "
                f"{_MAX_RANGES:,}"
            )
            return
        self._entry.extend(
            "annotations",
            **call_columns(self._ranges, self._capture.names, self._base_ns),
        )


def held_bytes(memory: pd.DataFrame, start: int) -> tuple[pd.DataFrame, int]:
    """Return columns t and bytes that a process holds on one device.

    Return also the bytes before the first row: a block that is released without an
    allocation among the rows was there from `start` on, at the latest the first row's
    time.
    """
    rows = memory.sort_values(["address", "t"], kind="stable")
    releases = rows["released"] != 0
    after_allocation = rows["address"].eq(rows["address"].shift()) & ~releases.shift(
        fill_value=True
    )
    unknown = releases & ~after_allocation
    earlier = int(rows.loc[unknown, "bytes"].sum())
    changes = rows["bytes"].where(~releases, -rows["bytes"])
    sizes = pd.DataFrame({"t": rows["t"], "change": changes}).sort_values(
        "t", kind="stable"
    )
    if earlier:
        sizes = pd.concat([pd.DataFrame({"t": [start], "change": [earlier]}), sizes])
    sizes = sizes.assign(bytes=sizes["change"].cumsum()).drop_duplicates(
        "t", keep="last"
    )
    return sizes[["t", "bytes"]].reset_index(drop=True), earlier
