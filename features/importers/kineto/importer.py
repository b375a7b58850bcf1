"""Imports Chrome traces of torch.profiler (Kineto): phases, memory, copies and kernels
of one rank per file."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from msgspec import UNSET

from ebbtide.features.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.features.importers.kineto.phases import (
    ANNOTATION,
    CALLS,
    LEGACY_PROCESS,
    NO_LAUNCHES,
    OPS,
    DeviceTimes,
    Marks,
    find_phases,
    no_launches,
)
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.chrome_trace.device_kinds import (
    KIND_OF_TYPE,
    TASKS_KIND,
    UNREAD_CATEGORIES,
)
from ebbtide.profiler.chrome_trace.events import MISSING, Event, IntTable, spans
from ebbtide.profiler.chrome_trace.gpu_activities import (
    DEVICE_CATEGORIES,
    NO_TIME,
    GpuActivities,
)
from ebbtide.profiler.chrome_trace.host_calls import call_columns
from ebbtide.profiler.chrome_trace.host_ranges import HostRanges, operators, self_times
from ebbtide.profiler.chrome_trace.reader import ChromeTrace
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from ebbtide.workers import WorkerDied, runner

# A trace with more annotations would grow by what nobody reads one by one.
MAX_COUNT = 200_000
_HEAD = re.compile(
    rb'(?:\xef\xbb\xbf)?\s*(?:\{.*"(?:traceEvents|schemaVersion)"\s*:|\[\s*\{.*"ph"\s*:)',
    re.DOTALL,
)
_RANK = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_MAX_COUNT = 10_000_000
# Processes start in about a second, in which one reads ten small files.
_MIN_FILES_FOR_PROCESSES = 32
# The category of instant events; torch before 1.12 gave them none.
MEMORY_CATEGORIES = frozenset({"cpu_instant_event", ""})
_NAME = "[memory]"
# Categories of torch.profiler's events, those that are not read included.
_READ_CATEGORIES = OPS | {CALLS} | DEVICE_CATEGORIES | MEMORY_CATEGORIES
_CATEGORIES = (_READ_CATEGORIES | UNREAD_CATEGORIES) - MEMORY_CATEGORIES
# Events of torch.autograd.profiler have no categories; their process tells.
_LEGACY_CATEGORIES = {LEGACY_PROCESS: "cpu_op", "CUDA functions": "kernel"}
_CPU = 0  # c10::DeviceType
_SHOWN_CATEGORIES = 3
_MAX_OPERATORS = 20


class KinetoImporter:
    """Importer of Chrome traces that torch.profiler writes."""

    format = "kineto"
    recognition = Recognition.JSON_KEYS
    stage = Stage.PROFILE

    def matches(self, source: Source) -> bool:
        return _HEAD.match(source.head) is not None

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        is_spread = options.scheduler is not None or (
            options.jobs > 1 and len(sources) >= _MIN_FILES_FOR_PROCESSES
        )
        if is_spread and not builder.ranks:
            _read_elsewhere(builder, sources, runner(options.jobs, options.scheduler))
            return []
        for number, source in enumerate(sources):
            read_trace(source, builder, number)
        return []


def _read_elsewhere(
    builder: TraceBuilder, sources: Sequence[Source], run: Callable[..., Any]
) -> None:
    """Add the contents of traces to a builder without ranks.

    The result is as if `read_trace` read them one by one.
    """
    tasks = {
        str(number): (source.path.absolute(), number)
        for number, source in enumerate(sources)
    }
    outcomes = dict(run(_read_alone, tasks))
    for source, outcome in zip(sources, map(outcomes.__getitem__, tasks), strict=True):
        if isinstance(outcome, WorkerDied):
            raise SourceError(f"{source} could not be read: {outcome}; try --jobs 1")
        for rank, entry in outcome.ranks.items():
            _refuse_second_file(builder, source, rank, entry.meta)
            builder.ranks[rank] = entry
        for note in outcome.meta["notes"]:
            builder.note(note)


def _read_alone(file: tuple[Path, int]) -> TraceBuilder:
    path, number = file
    builder = TraceBuilder("imported")
    read_trace(Source(path), builder, number)
    return builder


def _refuse_second_file(
    builder: TraceBuilder, source: Source, rank: int, meta: dict[str, Any]
) -> None:
    """Raise SourceError if another file is of the same rank.

    If its file states no rank, raise it if the process is the same.
    """
    host, pid = meta.get("host"), meta.get("pid")
    is_anonymous = "world_size" not in meta and None not in (host, pid)
    for number, entry in builder.ranks.items():
        if (other := entry.meta.get("imported_from")) is None:
            continue
        if number == rank:
            raise SourceError(
                f"{other} and {source} are both of rank {rank}: import one file per "
                "rank"
            )
        if is_anonymous and (host, pid) == (
            entry.meta.get("host"),
            entry.meta.get("pid"),
        ):
            raise SourceError(
                f"{other} and {source} are both of process {pid} on {host}: import one "
                "file per process"
            )


def read_trace(source: Source, builder: TraceBuilder, number: int) -> None:
    """Add the contents of a trace to its rank.

    The rank is `number` if neither the file nor its name states one.
    """
    contents = _Contents(source)
    trace = contents.trace
    entry = _rank_entry(source, builder, number, contents)
    notes = []
    if trace.stop_reason:
        reason = trace.stop_reason.replace(str(source), "it", 1)
        notes.append(
            f"{reason} after {trace.count} events: the events before that are imported"
        )
    if trace.skipped:
        notes.append(f"{trace.skipped} events could not be read and are left out")
    _add_phases(entry, contents, notes)
    _add_devices(entry, contents, _add_memory(entry, contents, notes))
    _add_device_activity(entry, contents, notes)
    _add_annotations(entry, contents, notes)
    for note in notes:
        builder.note(f"{source.path.name}: {note}")


class _Contents:
    """The parts of a file's events that are kept."""

    def __init__(self, source: Source) -> None:
        self.marks, self.ranges = Marks(), HostRanges()
        self.device, self.memory = GpuActivities(), AllocatorMemory()
        self.pid: int | None = None
        self.unread: Counter[str] = Counter()
        self._is_torch = False
        with source.open() as file:
            self.trace = ChromeTrace(file)
            try:
                for batch in self.trace.batches():
                    self._add(batch)
            except ValueError as error:
                raise source.damaged(error) from None
        if not self.trace.count:
            raise SourceError(f"{source} has no events")
        if not self._is_torch and not self.trace.stop_reason:
            raise SourceError(
                f"{source} has no events of torch.profiler: another tool wrote this "
                "Chrome trace"
            )

    def _add(self, batch: list[Event]) -> None:
        by_category: defaultdict[str, list[Event]] = defaultdict(list)
        for event in batch:
            if event.ts is not UNSET:
                own = event if event.cat else _with_category(event)
                by_category[own.cat].append(own)
        for category, events in by_category.items():
            self._is_torch |= category in _CATEGORIES or any(
                event.name == _NAME for event in events
            )
            if category in OPS:
                self.pid = events[0].pid if _is_count(events[0].pid) else self.pid
                self.marks.add_ops(events)
                self.ranges.add(events)
            elif category == CALLS:
                self.marks.add_calls(events)
            elif category in DEVICE_CATEGORIES:
                self.device.add(events)
            elif category in MEMORY_CATEGORIES:
                self.device.add_tasks(events)
                self.memory.add(events)
                self.device.add_types(event.args.device_type for event in events)
            elif category not in UNREAD_CATEGORIES:
                self.unread[category] += len(events)


def _with_category(event: Event) -> Event:
    """Return an event without a category with the one that its process tells."""
    category = _LEGACY_CATEGORIES.get(str(event.pid))
    if category is None:
        return event
    device = event.tid if _is_count(event.tid) and category != "cpu_op" else MISSING
    args = msgspec.structs.replace(event.args, device=device)
    return msgspec.structs.replace(event, cat=category, args=args)


def _rank_entry(
    source: Source, builder: TraceBuilder, number: int, contents: _Contents
) -> RankBuilder:
    """Return the builder of a file's rank: the one that the file states, else the one
    in its name, else `number`."""
    info = contents.trace.meta.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    in_name = _RANK.search(source.path.name)
    rank: int = (
        info["rank"]
        if _is_count(info.get("rank"))
        else int(in_name.group(1))
        if in_name
        else number
    )
    meta: dict[str, Any] = {"imported_from": source.path.name, "pid": contents.pid}
    if _is_count(info.get("world_size")):
        meta["world_size"] = info["world_size"]
    for key, value in (
        ("backend", info.get("backend")),
        ("host", contents.trace.meta.get("host_name")),
    ):
        if isinstance(value, str):
            meta[key] = value
    _refuse_second_file(builder, source, rank, meta)
    entry = builder.rank(rank)
    entry.meta.update(meta)
    return entry


def _is_count(value: Any) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and 0 <= value < _MAX_COUNT
    )


def _add_phases(entry: RankBuilder, contents: _Contents, notes: list[str]) -> None:
    # Marks that a file lacks may be in the part that is cut off.
    marked = find_phases(contents.marks, [] if contents.trace.stop_reason else notes)
    device_times = DeviceTimes(contents.device.work)
    times, step_ends = (
        device_times.times(marked.phases),
        device_times.ends(marked.steps),
    )
    if contents.trace.stop_reason:
        # Kineto writes the events of the GPU last: those that are there may be a part
        # of what a phase launched.
        times[:] = step_ends[:] = pd.NA
        if len(marked.phases):
            notes.append(
                "the GPU's events are at the end, which is cut off: phases have the "
                "host's times"
            )
    if not entry.frame("phases").empty:
        notes.append("its phases are left out: another file has phases of this rank")
        return
    marked.add_to(entry, times, step_ends, contents.trace.base_ns)
    if no_launches(contents.device.work) and len(marked.phases):
        notes.append(NO_LAUNCHES)


def _add_memory(entry: RankBuilder, contents: _Contents, notes: list[str]) -> list[str]:
    """Add memory, and return the devices that allocated any."""
    changes = contents.memory.changes()
    if changes.empty:
        notes.append("it has no memory events (profile_memory=True records them)")
    entry.extend(
        "memory", **changes.assign(t_ns=changes["t_ns"] + contents.trace.base_ns)
    )
    return [str(device) for device in changes["device"].unique()]


def _add_devices(
    entry: RankBuilder, contents: _Contents, allocating: list[str]
) -> None:
    """Add the devices of the rank: the ones that ran anything, then the ones that only
    allocated; the CPU only where it alone did.

    Without any sign of a device nothing is known of where the job ran: activities are
    recorded on request."""
    kind = contents.device.device_kind
    used = [f"{kind}:{number}" for number in contents.device.busiest()]
    used += [
        device
        for device in allocating
        if device not in used and (device != "cpu" or not used)
    ]
    if contents.trace.stop_reason and used == ["cpu"]:
        used = []
    properties = contents.trace.meta.get("deviceProperties")
    properties = (
        [card for card in properties if isinstance(card, dict)]
        if isinstance(properties, list)
        else []
    )
    cards = {f"{kind}:{card.get('id')}": card for card in properties}
    own = [_device_entry(name, cards.get(name, {})) for name in used]
    others = [
        device for device in entry.meta["devices"] if device["device"] not in used
    ]
    entry.meta["devices"] = own + others


def _device_entry(name: str, card: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a device in the trace's metadata."""
    model, capacity = card.get("name"), card.get("totalGlobalMem")
    return {
        "device": name,
        "kind": name.partition(":")[0],
        "name": model if isinstance(model, str) else None,
        "capacity_bytes": capacity
        if type(capacity) is int and 0 < capacity < 1 << 63
        else None,
    }


def _add_device_activity(
    entry: RankBuilder, contents: _Contents, notes: list[str]
) -> None:
    device, base_ns = contents.device, contents.trace.base_ns
    copies = device.transfers(base_ns)
    entry.extend("transfers", **copies)
    if device.duplicates:
        notes.append(
            f"GPU activities that are in it twice are counted once: {device.duplicates}"
        )
    if contents.trace.stop_reason:
        notes.append(
            "copies are at its end, which is cut off: how much was copied is not known"
        )
        return
    if device.empty:
        notes.append(NO_TIME.format(device.empty))
    if contents.unread:
        most = contents.unread.most_common(_SHOWN_CATEGORIES)
        named = ", ".join(f"{category} ({count:,})" for category, count in most)
        notes.append(f"events of categories that are not known are left out: {named}")
    if device.waits:
        notes.append(f"tasks that only wait or signal are left out: {device.waits:,}")
    if device.work.empty:
        entry.meta["operators"] = _operator_times(contents.ranges)
        notes.append(
            "it has no GPU events, so no copies (ProfilerActivity.CUDA records them)"
        )
        return
    clear = not device.unclear_copies and contents.device.device_kind != TASKS_KIND
    entry.meta["transfers_recorded"] = clear
    if not clear:
        notes.append(
            "h2d and d2h are not known: names of copies do not tell their direction "
            f"({device.unclear_copies:,})"
        )
    ranges = contents.ranges
    launched_by = operators(device.work, ranges.rows(), ranges.names)
    entry.extend("kernels", **device.kernels(base_ns), operator=launched_by)
    entry.extend("calls", **device.calls(base_ns))
    if clear and not len(copies["start_ns"]):
        notes.append("it has no copy between host and device")


def _operator_times(ranges: HostRanges) -> list[dict[str, Any]]:
    """Return the operators of the CPU that take the most time themselves."""
    rows = pd.concat([ranges.rows(category) for category in sorted(OPS - {ANNOTATION})])
    rows = rows.assign(self_ns=self_times(rows))
    by_name = rows.groupby("name")["self_ns"].agg(["size", "sum"])
    longest = by_name.nlargest(_MAX_OPERATORS, "sum")
    return [
        {"name": ranges.names[int(name)], "calls": int(calls), "self_ns": int(self_ns)}
        for name, calls, self_ns in longest.itertuples()
    ]


def _add_annotations(entry: RankBuilder, contents: _Contents, notes: list[str]) -> None:
    rows = contents.ranges.rows(ANNOTATION)
    if len(rows) > MAX_COUNT:
        notes.append(
            f"its {len(rows):,} annotations are left out: a trace keeps up to "
            f"{MAX_COUNT:,}"
        )
        return
    entry.extend(
        "annotations",
        **call_columns(rows, contents.ranges.names, contents.trace.base_ns),
    )


class AllocatorMemory:
    """Collects the memory events of a trace."""

    def __init__(self) -> None:
        self._rows = IntTable("t_ns", "type", "device", "allocated", "reserved")

    def add(self, events: list[Event]) -> None:
        """Add the memory events among events of the MEMORY_CATEGORIES."""
        events = [
            event
            for event in events
            if event.name == _NAME and event.args.allocated != MISSING
        ]
        if events:
            rows = [
                (
                    e.args.device_type,
                    e.args.device_id,
                    e.args.allocated,
                    e.args.reserved,
                )
                for e in events
            ]
            self._rows.add(spans(events)[0], *np.array(rows, np.int64).T)

    def changes(self) -> pd.DataFrame:
        """Return t_ns, device, pool and bytes of each change of a pool.

        Pools are of accelerators, or else of the CPU.
        """
        rows = self._rows.table().sort_values("t_ns", kind="stable")
        if rows.empty:
            return pd.DataFrame(columns=["t_ns", "device", "pool", "bytes"])
        accelerated = rows[rows["type"].isin(list(KIND_OF_TYPE))]
        if len(accelerated):
            names = (
                accelerated["type"].map(KIND_OF_TYPE)
                + ":"
                + accelerated["device"].clip(lower=0).astype(str)
            )
            rows, pools = accelerated.assign(device=names), ["allocated", "reserved"]
        else:
            rows, pools = rows[rows["type"] == _CPU].assign(device="cpu"), ["allocated"]
        sizes = rows.melt(
            ["t_ns", "device"], pools, var_name="pool", value_name="bytes"
        )
        previous = sizes.groupby(["device", "pool"])["bytes"].shift()
        return sizes[sizes["bytes"].ne(previous) & sizes["bytes"].ne(MISSING)]
