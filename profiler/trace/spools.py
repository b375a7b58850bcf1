"""Reads spools, whole or cut off anywhere, into the tables of a trace."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import HOST, MISSING
from ebbtide.profiler.trace import spool_ops, transfers
from ebbtide.profiler.trace.schema import TABLES, frame

# The layout of `agent.spool.RECORD`.
RECORD = np.dtype(
    [("kind", "u1"), ("code", "u1"), ("small", "<u2"), ("a", "<u4"), ("b", "<u4"), ("c", "<u4")]
    + [(name, "<i8") for name in "wxyz"]
)
Records = npt.NDArray[Any]


@dataclass
class RankData:
    """What was recovered of one process: its entry in the meta, and its tables."""

    meta: dict[str, Any]
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)


def recover(directory: Path, meta: dict[str, Any]) -> tuple[list[RankData], list[str]]:
    """The ranks that left spools in `directory`, in order of rank, and notes on what is not whole.

    meta: that of the trace, for its host, its devices and the iterations asked for.
    """
    notes: list[str] = []
    sampled = [r for r in (_read(p, notes) for p in sorted(directory.glob("sampler-*.spool"))) if r is not None]
    samples = np.concatenate(sampled) if sampled else np.empty(0, RECORD)
    found = []
    for path in sorted(directory.glob("agent-*.spool")):
        records = _read(path, notes)
        if records is not None:
            found.append(_rank(path, records, samples, meta, notes))
    found.sort(key=lambda data: (data.meta["rank"], data.meta["started_ns"]))
    _number(found, notes)
    return found, notes


def _read(path: Path, notes: list[str]) -> Records | None:
    """The whole records of a spool; None where it does not even have its header."""
    raw = path.read_bytes()
    records = np.frombuffer(raw[: len(raw) - len(raw) % RECORD.itemsize], RECORD)
    magic = int.from_bytes(kinds.MAGIC, "little")
    if not len(records) or records[0]["kind"] != kinds.HEADER or records[0]["w"] != magic:
        notes.append(f"{path.name} holds no records: the process ended or the disk was full before its first")
        return None
    if records[0]["code"] != kinds.VERSION:
        notes.append(f"{path.name} was written by another version of ebbtide: not read")
        return None
    return records[_known(records)]


_CODES = {
    kinds.PHASE: len(kinds.PHASES),
    kinds.MEMORY: len(kinds.POOLS),
    kinds.LINK: len(kinds.LINK_SOURCES),
    kinds.STOPPED: len(kinds.STOP_REASONS),
    kinds.OP: len(kinds.OPS),
}


def _known(records: Records) -> npt.NDArray[np.bool_]:
    """Which records mean something: a disk that filled up or a power cut may leave others behind."""
    known = np.ones(len(records), bool)
    for kind, codes in _CODES.items():
        known &= (records["kind"] != kind) | (records["code"] < codes)
    known &= (records["kind"] != kinds.OP) | (records["c"] < len(kinds.RESOURCES))
    return known


def _rank(path: Path, records: Records, samples: Records, meta: dict[str, Any], notes: list[str]) -> RankData:
    header = records[0]
    facts = _facts(path.with_name(path.name.replace("agent-", "facts-").replace(".spool", ".json")))
    rank, pid = int(header["b"]), int(header["a"])
    stopped = records[records["kind"] == kinds.STOPPED]
    reason = kinds.STOP_REASONS[int(stopped[-1]["code"])] if len(stopped) else "cut off"
    if reason != "closed" and reason != "iterations":
        notes.append(f"rank {rank}: {_STOPS[reason]}")
    notes += [f"rank {rank}: {note}" for note in facts.pop("notes", [])]
    devices = facts.pop("devices", None) or [meta["host"]["cpu"]]
    gpus = meta["host"].get("gpus", [])
    entry = {
        "host": meta["host"]["name"],
        **facts,
        "rank": rank,
        "pid": pid,
        "world_size": int(header["c"]),
        "local_rank": int(header["z"]),
        "started_ns": int(header["x"]),
        "stopped": reason,
        "devices": [{**device, **_same_gpu(device, gpus)} for device in devices],
        "transfers_recorded": False,
    }
    phases = _phases(records)
    first, last = (meta.get("options", {}).get("iterations") or (0, None))[:2]
    starts = records[records["kind"] == kinds.START]
    if len(starts):
        entry["first_iteration_start_ns"] = int(starts[-1]["x"])
    elif len(phases):
        entry["first_iteration_start_ns"] = int(phases["start_ns"].min())
    data = RankData(entry, {table: frame(table) for table in TABLES})
    numbers = {gpu["index"]: device["device"] for device in entry["devices"] for gpu in gpus
               if gpu.get("uuid") and gpu["uuid"] == device.get("uuid")}  # fmt: skip
    ours = samples[(samples["kind"] != kinds.MEMORY) | (samples["small"] != HOST) | (samples["a"] == pid)]
    data.tables["memory"] = frame(
        "memory", pd.concat([_memory(records, None), _memory(ours, numbers)], ignore_index=True)
    )
    data.tables["link"] = frame("link", _link(ours, numbers))
    slices = sorted(path.parent.glob(path.stem.replace("agent-", "") + "-copies-*.json"))
    if slices:
        wall_to_monotonic = int(header["x"]) - int(header["y"])
        copies, trouble = transfers.read(slices, wall_to_monotonic)
        notes += [f"rank {rank}: {text}" for text in trouble]
        data.tables["transfers"] = copies
        entry["transfers_recorded"] = True
    elif meta.get("options", {}).get("transfers"):
        notes.append(f"rank {rank}: no copies were recorded: {_NO_COPIES[devices[0].get('kind') == 'cuda']}")
    data.tables["phases"] = frame("phases", phases)
    data.tables["ops"] = spool_ops.read(records)
    if first or last is not None:
        _trim(data, first, last)
    return data


_STOPS = {
    "cut off": "its recording was cut off (the process was killed, or no space was left on the device)",
    "max-size": "its recording stopped at --max-size",
    "fault": "its recording ended by a fault of the recorder",
}


_NO_COPIES = {False: "the job did not use a GPU", True: "the profiler for them gave nothing"}


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _same_gpu(device: dict[str, Any], gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """What NVML knows of the GPU that torch calls `device`."""
    for gpu in gpus:
        if gpu.get("uuid") and gpu["uuid"] == device.get("uuid"):
            return {key: gpu.get(key) for key in ("pci_bus_id", "link", "driver")}
    return {}


def _phases(records: Records) -> pd.DataFrame:
    """Phases with their device times, the iteration that each belongs to, and its micro-step within it."""
    rows = records[records["kind"] == kinds.PHASE]
    phases = pd.DataFrame(
        {
            "sequence": rows["a"].astype(np.int64),
            "iteration": spool_ops.iterations(records, rows["a"]),
            "phase": [kinds.PHASES[code] for code in rows["code"]],
            "start_ns": rows["x"],
            "end_ns": rows["y"],
        }
    )
    phases = phases.merge(spool_ops.device_times(records), on="sequence", how="left").sort_values(
        "start_ns", kind="stable"
    )
    phases["micro_step"] = micro_steps(phases)
    return phases


def micro_steps(phases: pd.DataFrame) -> pd.Series[int]:
    """Within an iteration, a forward that follows a backward begins the next micro-step."""
    iteration = phases["iteration"].fillna(-1)
    forward = phases["phase"].eq("forward")
    before = phases["phase"].shift().where(iteration.eq(iteration.shift()))
    return (forward & before.isin(["backward", "update"])).groupby(iteration).cumsum().astype("int64")


def _memory(records: Records, numbers: dict[int, str] | None) -> pd.DataFrame:
    """numbers: from NVML's numbers to the names that this rank gives its devices; None: the rank's own."""
    rows = records[(records["kind"] == kinds.MEMORY) & (records["y"] != MISSING)]
    table = pd.DataFrame(
        {
            "t_ns": rows["x"],
            "device": _devices(rows["small"], numbers),
            "pool": pd.Categorical.from_codes(rows["code"].astype(int), list(kinds.POOLS)).astype(str),
            "bytes": rows["y"],
        }
    )
    return table[table["device"].notna()]


def _link(records: Records, numbers: dict[int, str]) -> pd.DataFrame:
    rows = records[records["kind"] == kinds.LINK]
    table = pd.DataFrame(
        {
            "t_ns": rows["x"],
            "device": _devices(rows["small"], numbers),
            "h2d_bytes_per_s": np.where(rows["y"] == MISSING, np.nan, rows["y"]),
            "d2h_bytes_per_s": np.where(rows["z"] == MISSING, np.nan, rows["z"]),
            "source": [kinds.LINK_SOURCES[code] for code in rows["code"]],
            "window_ns": rows["w"],
            "generation": pd.array(rows["a"], dtype="Int64"),
            "width": pd.array(rows["b"], dtype="Int64"),
        }
    )
    for column in ("generation", "width"):
        table[column] = table[column].where(table[column] != 0)
    return table[table["device"].notna()]


def _devices(numbers: npt.NDArray[Any], names: dict[int, str] | None) -> pd.Series[Any]:
    table: dict[int, str | None] = {}
    for number in np.unique(numbers).tolist():
        own = f"cuda:{number}" if names is None else names.get(number)
        table[number] = "cpu" if number == HOST else own
    return pd.Series(numbers.astype(int)).map(table)


def _trim(data: RankData, first: int, last: int | None) -> None:
    """Keep the iterations [first, last): the recorder works a little wider, to see where they end."""
    phases, ops = data.tables["phases"], data.tables["ops"]
    phases = data.tables["phases"] = phases[_asked(phases, first, last)].reset_index(drop=True)
    data.tables["ops"] = spool_ops.kept(ops, _asked(ops, first, last))
    begin = data.meta.get("first_iteration_start_ns", 0)
    end = phases["end_ns"].max() if last is not None and len(phases) else None
    for table, column in (("memory", "t_ns"), ("link", "t_ns"), ("transfers", "start_ns")):
        rows = data.tables[table]
        if table == "memory":
            rows = _held(rows, begin)
        inside = rows[column] >= begin
        if end is not None:
            inside &= rows[column] <= end
        data.tables[table] = rows[inside].reset_index(drop=True)


def _asked(table: pd.DataFrame, first: int, last: int | None) -> pd.Series[bool]:
    """Which rows belong to the iterations [first, last): with no last, those of none too."""
    iteration = table["iteration"]
    asked = iteration.ge(first) & iteration.lt(last) if last is not None else iteration.ge(first) | iteration.isna()
    return asked.fillna(False).astype(bool)


def _held(memory: pd.DataFrame, begin: int) -> pd.DataFrame:
    """The memory lines with what each held at `begin` as a sample of that time."""
    last = memory[memory["t_ns"] < begin].groupby(["device", "pool"], as_index=False).tail(1)
    return frame("memory", pd.concat([last.assign(t_ns=begin), memory]))


def _number(found: list[RankData], notes: list[str]) -> None:
    """Give each process a rank of its own: a command may run several trainings that all say rank 0."""
    taken: set[int] = set()
    following = max((data.meta["rank"] for data in found), default=0) + 1
    for data in found:
        said = data.meta["rank"]
        if said in taken:
            data.meta["rank"], following = following, following + 1
            notes.append(
                f"process {data.meta['pid']} also said it was rank {said}: it stands as rank {data.meta['rank']}"
            )
        taken.add(data.meta["rank"])
    found.sort(key=lambda data: int(data.meta["rank"]))
