"""Chrome traces of torch.profiler (Kineto): the phases, the memory and the copies of one rank each."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from typing import Any, cast

from msgspec import UNSET

from ebbtide.profiler.chrome_trace.events import Event
from ebbtide.profiler.chrome_trace.reader import ChromeTrace
from ebbtide.profiler.importers.kineto.device_times import ACTIVITIES, LAUNCHES, Device
from ebbtide.profiler.importers.kineto.marks import CALLS, OPS, Marks
from ebbtide.profiler.importers.kineto.memory import CATEGORIES as MEMORY
from ebbtide.profiler.importers.kineto.memory import Memory
from ebbtide.profiler.importers.kineto.phases import phases
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from ebbtide.profiler.trace.transfers import CATEGORIES as COPIES
from ebbtide.profiler.trace.transfers import Transfers

FORMAT = "kineto"

_HEAD = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\{.*"(?:traceEvents|schemaVersion)"\s*:|\[\s*\{.*"ph"\s*:)', re.DOTALL)
_RANK = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)


def matches(source: Source) -> bool:
    return _HEAD.match(source.head) is not None


def read(source: Source, builder: TraceBuilder, number: int) -> None:
    """Add what a trace tells to its rank: the one that it names, else that in the file's name, else `number`.

    Raises SourceError for a file that is damaged from its beginning on, and for a second file of one rank.
    """
    contents = _Contents(source)
    trace = contents.trace
    entry = _entry(source, builder, number, trace.meta)
    notes = []
    if trace.trouble:
        trouble = trace.trouble.replace(str(source), "it", 1)
        notes.append(f"{trouble} after {trace.count} events: what stands before is imported")
    if trace.skipped:
        notes.append(f"{trace.skipped} events could not be read and are left out")
    _phases(entry, contents, notes)
    _memory(entry, contents, notes)
    _copies(entry, contents, notes)
    for note in notes:
        builder.note(f"{source.path.name}: {note}")


class _Contents:
    """What is kept of a file's events."""

    def __init__(self, source: Source) -> None:
        self.marks, self.device, self.memory, self.transfers = Marks(), Device(), Memory(), Transfers()
        with source.open() as file:
            self.trace = ChromeTrace(cast(io.BufferedReader, file))
            try:
                for batch in self.trace.batches():
                    self._add(batch)
            except ValueError as error:
                raise source.damaged(error) from None
        if not self.trace.count:
            raise SourceError(f"{source} has no events")

    def _add(self, batch: list[Event]) -> None:
        categories: defaultdict[str, list[Event]] = defaultdict(list)
        for event in batch:
            if event.ts is not UNSET:
                categories[event.cat].append(event)
        for category, events in categories.items():
            if category in OPS:
                self.marks.add_ops(events)
            elif category == CALLS:
                self.marks.add_calls(events)
            elif category in LAUNCHES:
                self.device.add_launches(events)
            elif category in ACTIVITIES:
                self.device.add_activities(events)
                if category in COPIES:
                    self.transfers.add(events)
            elif category in MEMORY:
                self.memory.add(events)


def _entry(source: Source, builder: TraceBuilder, number: int, meta: dict[str, Any]) -> RankBuilder:
    """The rank that the file is of."""
    told = meta.get("distributedInfo")
    told = told if isinstance(told, dict) else {}
    named = _RANK.search(source.path.name)
    rank: int = told["rank"] if _is_count(told.get("rank")) else int(named.group(1)) if named else number
    entry = builder.rank(rank)
    if "imported_from" in entry.meta:
        raise SourceError(
            f"{entry.meta['imported_from']} and {source} are both of rank {rank}: give one file of each rank"
        )
    entry.meta["imported_from"] = source.path.name
    if _is_count(told.get("world_size")):
        entry.meta["world_size"] = told["world_size"]
    for key, value in (("backend", told.get("backend")), ("host", meta.get("host_name"))):
        if isinstance(value, str):
            entry.meta[key] = value
    return entry


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000_000


def _phases(entry: RankBuilder, contents: _Contents, notes: list[str]) -> None:
    table, begin = phases(contents.marks, notes)
    table = table.join(contents.device.times(table))
    if not entry.frame("phases").empty:
        notes.append("its phases are left out: another file told those of this rank")
        return
    times = ["start_ns", "end_ns", "gpu_start_ns", "gpu_end_ns"]
    table[times] += contents.trace.base_ns
    entry.extend("phases", **table)
    if begin is not None:
        entry.meta["first_iteration_start_ns"] = begin + contents.trace.base_ns


def _memory(entry: RankBuilder, contents: _Contents, notes: list[str]) -> None:
    lines = contents.memory.lines()
    if lines.empty:
        notes.append("it tells nothing of memory (profile_memory=True records it)")
    entry.extend("memory", **lines.assign(t_ns=lines["t_ns"] + contents.trace.base_ns))
    used = [f"cuda:{number}" for number in contents.device.busiest()]
    used += [device for device in lines["device"].unique() if device not in used and (device != "cpu" or not used)]
    told = contents.trace.meta.get("deviceProperties")
    told = [card for card in told if isinstance(card, dict)] if isinstance(told, list) else []
    cards = {f"cuda:{card.get('id')}": card for card in told}
    ours = [_device(name, cards.get(name, {})) for name in used or ["cpu"]]
    others = [device for device in entry.meta["devices"] if device["device"] not in used]
    entry.meta["devices"] = ours + others


def _device(name: str, card: dict[str, Any]) -> dict[str, Any]:
    """A device's entry in the trace's meta."""
    model, capacity = card.get("name"), card.get("totalGlobalMem")
    return {
        "device": name,
        "kind": name.partition(":")[0],
        "name": model if isinstance(model, str) else None,
        "capacity_bytes": capacity if isinstance(capacity, int) and capacity > 0 else None,
    }


def _copies(entry: RankBuilder, contents: _Contents, notes: list[str]) -> None:
    table = contents.transfers.table(contents.trace.base_ns)
    entry.extend("transfers", **table)
    if not contents.device.busiest():
        notes.append("it tells nothing of a GPU, so neither of copies (ProfilerActivity.CUDA records them)")
        return
    entry.meta["transfers_recorded"] = True
    if table.empty:
        notes.append("it has no copy between host and device")
