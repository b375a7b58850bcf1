"""Recovers the traces of a recording from its spools, complete or cut off anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from ebbtide import seams
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import HOST
from ebbtide.profiler.memory_snapshot.recorded import read_recorded
from ebbtide.profiler.recording.lock import wait_until_finished
from ebbtide.profiler.recording.spools.devices import (
    device_names,
    note_on_unused_gpus,
    notes_on_devices,
    nvml_info,
)
from ebbtide.profiler.recording.spools.out_of_memory_text import with_stated_figures
from ebbtide.profiler.recording.spools.records import (
    RECORD,
    Records,
    detailed_slices,
    first_start_ns,
    has_updates,
    note_on_iterations,
    read_records,
    stop_reason,
)
from ebbtide.profiler.recording.spools.slices import read_slices, slice_spans
from ebbtide.profiler.recording.spools.tables import (
    gpu_table,
    link_table,
    marks_table,
    memory_table,
    ops_table,
    phases_table,
    select_rows,
)
from ebbtide.profiler.recording.spools.trainings import (
    RankData,
    Training,
    group_trainings,
    note_other_trainings,
)
from ebbtide.profiler.sampler.numa import placement_file
from ebbtide.profiler.trace.files import open_trace, read_meta
from ebbtide.profiler.trace.frames import empty_frame, frame
from ebbtide.profiler.trace.metadata import NumaPlacement, RankInfo, without_nulls
from ebbtide.profiler.trace.schema import SORT, SPOOL, TABLES
from ebbtide.profiler.trace.trace import Trace
from ebbtide.profiler.trace.untrusted import MAX_META_BYTES, read_regular


def recover(directory: Path, meta: dict[str, Any]) -> list[Training]:
    """Return the trainings in the spools, in the order in which they began.

    There is at least one, maybe without ranks.
    """
    notes: list[str] = []
    sampled = [
        r
        for r in (
            read_records(p, notes) for p in sorted(directory.glob("sampler-*.spool"))
        )
        if r is not None
    ]
    samples = np.concatenate(sampled) if sampled else np.empty(0, RECORD)
    processes = []
    for path in sorted(directory.glob("agent-*.spool")):
        records = read_records(path, notes)
        if records is not None:
            processes.append(read_process(path, records, samples, meta))
    trainings = group_trainings(processes) or [Training([])]
    unused = note_on_unused_gpus(
        (data.meta["devices"] for data in processes), meta["host"]
    )
    trainings[0].notes += notes + ([unused] if unused else [])
    return trainings


def read_process(
    path: Path,
    records: Records,
    samples: Records,
    meta: dict[str, Any],
    with_files: bool = True,
) -> RankData:
    """Convert the records of one process into its tables.

    `path` is its spool, beside its description. `with_files`: whether to read the
    copies and the allocations that it wrote into further files.
    """
    header = records[0]
    host, options = meta["host"], meta.get("options", {})
    gpus = host.get("gpus") or []
    facts = path.with_name(
        path.name.replace("agent-", "facts-").replace(".spool", ".json")
    )
    job_info = _described(facts, _check_job_info)
    entry = _entry(header, job_info, host, gpus)
    pid = entry["pid"]
    if placement := _described(
        placement_file(path.parent, pid),
        lambda read: msgspec.convert(read, NumaPlacement),
    ):
        entry["numa"] = placement
    entry["stopped"] = stop_reason(records) or "cut off"
    notes = list(job_info.get("notes", []))
    notes += [note for note in [note_on_iterations(records)] if note]
    phases = phases_table(records)
    if (start_ns := first_start_ns(records)) is not None:
        entry["first_iteration_start_ns"] = start_ns
    entry["detailed_slices"] = detailed_slices(records)
    data = RankData(entry, {table: empty_frame(table) for table in TABLES}, notes)
    data.stepped = has_updates(records)
    data.tables["phases"] = frame("phases", phases)
    data.tables["ops"] = ops_table(records)
    data.tables["marks"] = marks_table(records)
    names = device_names(entry["devices"], gpus)
    notes += notes_on_devices(entry["devices"], host)
    own = samples[
        (samples["kind"] != kinds.MEMORY)
        | (samples["small"] != HOST)
        | (samples["a"] == pid)
    ]
    memory = pd.concat(
        [memory_table(records, None), memory_table(own, names)], ignore_index=True
    )
    data.tables["memory"] = frame("memory", memory)
    data.tables["link"] = link_table(own, names)
    data.tables["gpu"] = gpu_table(samples, names)
    if with_files:
        expects_copies = options.get("transfers") or any(
            detailed["transfers"] for detailed in entry["detailed_slices"]
        )
        _add_files(data, path, header, bool(expects_copies))
    first, end = options.get("iterations") or (0, None)
    if first or end is not None:
        _trim(data, first, end)
    return data


def _add_files(data: RankData, path: Path, header: Any, expects_copies: bool) -> None:
    """Add a process's copies, kernels and allocations, from files of their own."""
    notes = data.notes
    slice_paths = sorted(
        path.parent.glob(path.stem.replace("agent-", "") + "-copies-*.json")
    )
    if slice_paths:
        tables, problems = read_slices(slice_paths, int(header["x"]) - int(header["y"]))
        data.tables |= tables
        notes += problems
        data.meta["transfers_recorded"] = True
        data.meta["transfers_spans_ns"] = slice_spans(
            slice_paths, data.tables["phases"]
        )
    elif expects_copies:
        on_gpu = data.meta["devices"][0].get("kind") == "cuda"
        reason = (
            "the profiler for them gave nothing"
            if on_gpu
            else "the job did not use a GPU"
        )
        notes.append(f"no copies were recorded: {reason}")
    description = path.with_name(
        path.stem.replace("agent-", "") + "-allocations-description.json"
    )
    if description.exists():
        try:
            allocations, memory = read_recorded(description)
        except (OSError, ValueError, LookupError, TypeError) as error:
            notes.append(f"the recorded allocations could not be read ({error})")
            return
        data.tables["allocations"] = frame("allocations", allocations)
        data.tables["memory"] = frame(
            "memory", pd.concat([data.tables["memory"], memory], ignore_index=True)
        )


def _entry(
    header: Any,
    job_info: dict[str, Any],
    host: dict[str, Any],
    gpus: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the entry of a process in meta.json, from the agent's description and the
    header of its spool."""
    devices = job_info.get("devices") or [
        host.get("cpu") or {"device": "cpu", "kind": "cpu"}
    ]
    return {
        "host": host.get("name"),
        **{
            key: value
            for key, value in with_stated_figures(job_info).items()
            if key != "notes"
        },
        "rank": int(header["b"]),
        "pid": int(header["a"]),
        "world_size": int(header["c"]),
        "local_rank": int(header["z"]),
        "started_ns": int(header["x"]),
        "devices": [{**device, **nvml_info(device, gpus)} for device in devices],
        "transfers_recorded": False,
    }


def _described(path: Path, check: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return what the agent or the sampler describes in a file.

    The result is empty where the file is missing or damaged.
    """
    try:
        description: dict[str, Any] = json.loads(read_regular(path, MAX_META_BYTES))
        check(description)
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return description


def _check_job_info(job_info: dict[str, Any]) -> None:
    # the header has the rank
    msgspec.convert(without_nulls({**job_info, "rank": 0}), RankInfo)
    msgspec.convert(job_info.get("notes", []), list[str])


# Tables with what the device does, also after the host's last phase.
_OF_DEVICE = ("link", "transfers", "kernels")


def _trim(data: RankData, first: int, end: int | None) -> None:
    """Keep the iterations [first, end).

    The agent records a little more, to see where they end.
    """
    phases, ops = data.tables["phases"], data.tables["ops"]
    phases = data.tables["phases"] = phases[_in_range(phases, first, end)].reset_index(
        drop=True
    )
    data.tables["ops"] = select_rows(ops, _in_range(ops, first, end))
    begin_ns = data.meta.get("first_iteration_start_ns", 0)
    end_ns = phases["end_ns"].max() if end is not None and len(phases) else None
    # The device finishes the last iteration later than the host.
    device_end_ns = pd.concat([phases["end_ns"], phases["gpu_end_ns"].dropna()]).max()
    for table in ("memory", "link", "gpu", "transfers", "kernels", "calls", "marks"):
        rows, column = data.tables[table], SORT[table]
        if table == "memory":
            rows = _with_values_at(rows, begin_ns)
        inside = rows[column] >= begin_ns
        if end_ns is not None:
            # A window of the link's counters that begins before the end has bytes of
            # the last copies.
            begins_ns = (
                rows["t_ns"] - rows["window_ns"] if table == "link" else rows[column]
            )
            inside &= begins_ns <= (device_end_ns if table in _OF_DEVICE else end_ns)
        data.tables[table] = rows[inside].reset_index(drop=True)


def _in_range(table: pd.DataFrame, first: int, end: int | None) -> pd.Series[bool]:
    """Return which rows belong to the iterations [first, end).

    Without an end, rows of no iteration belong too.
    """
    iteration = table["iteration"]
    rows = (
        iteration.ge(first) & iteration.lt(end)
        if end is not None
        else iteration.ge(first) | iteration.isna()
    )
    return rows.fillna(False).astype(bool)


def _with_values_at(memory: pd.DataFrame, begin_ns: int) -> pd.DataFrame:
    """Add a row per pool with its value at `begin_ns`."""
    last = (
        memory[memory["t_ns"] < begin_ns]
        .groupby(["device", "pool"], as_index=False)
        .tail(1)
    )
    return frame("memory", pd.concat([last.assign(t_ns=begin_ns), memory]))


def unfinished_trace(path: Path) -> Trace:
    """Open a trace whose recording goes on or was cut off.

    If its job has just ended, wait for it first.
    """
    wait_until_finished(path)
    meta = read_meta(path)
    return (
        recovered_traces(path, meta)[0]
        if meta.get("state") == "recording"
        else open_trace(path)
    )


def recovered_traces(path: Path, meta: dict[str, Any]) -> list[Trace]:
    """Return a trace per training, read into memory.

    The first has the recording's path, others with new ones.
    """
    trainings = recover(path / SPOOL, meta)
    paths = [path, *islice(_free_paths(path), len(trainings) - 1)]
    note_other_trainings(trainings, [free.name for free in paths])
    return [
        trace_of(free, meta, training)
        for free, training in zip(paths, trainings, strict=True)
    ]


def _free_paths(path: Path) -> Iterator[Path]:
    """Yield RUN-2.ebb, RUN-3.ebb, ... beside RUN.ebb, as far as they do not exist."""
    for number in count(2):
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        if not os.path.lexists(free):
            yield free


def trace_of(path: Path, meta: dict[str, Any], training: Training) -> Trace:
    """Return the trace of one training of a recording."""
    tables = {
        (data.meta["rank"], table): data.tables[table]
        for data in training.ranks
        for table in TABLES
    }
    notes = [*meta.get("notes", []), *training.notes]
    meta = {**meta, "ranks": [data.meta for data in training.ranks], "notes": notes}
    for key in seams.plugs("setups"):
        # The first rank's: the others have the same configuration.
        sections = [
            section
            for data in training.ranks
            if isinstance(section := data.meta.pop(key, None), dict)
        ]
        if sections:
            meta[key] = sections[0]
    return Trace(path, meta, lambda rank, table: tables[rank, table])
