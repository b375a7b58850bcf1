"""A trace in figures: what `ebbtide summary` prints."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import to_frame
from ebbtide.analysis.metrics.devices import capacity_bytes, first_device, main_pool, memory_line
from ebbtide.analysis.metrics.iterations import PHASES, counted, intervals, median_ms, slowest_times
from ebbtide.analysis.metrics.phases import phase_bytes, phase_peaks
from ebbtide.analysis.timeseries.step_functions import union_length
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class PhaseSummary:
    """One phase over the counted iterations; None for what was not recorded.

    count: how often it came, each micro-step once. median_ms, p95_ms: of its time per iteration, on the slowest
    rank. share: its part of the time of all counted iterations. Bytes: median over iterations and ranks.
    """

    phase: str
    count: int
    median_ms: float | None
    p95_ms: float | None
    peak_bytes: int | None
    min_free_bytes: int | None
    h2d_bytes: int | None
    d2h_bytes: int | None
    share: float | None


@dataclass(frozen=True)
class TransferSummary:
    """All copies of one direction in the trace, all ranks; None where copies were not recorded."""

    count: int | None
    bytes: int | None
    busy_ms: float | None


@dataclass(frozen=True)
class MemorySummary:
    """Peaks over the whole trace, the largest rank's. pool: the one that peak_bytes is of."""

    capacity_bytes: int | None
    peak_bytes: int | None
    pool: str | None
    pools: dict[str, int]


@dataclass(frozen=True)
class Summary:
    """What a trace says in one page."""

    iterations: int
    warmup_iterations: int
    ranks: int
    iteration_ms: float | None
    phases: list[PhaseSummary]
    transfers: dict[str, TransferSummary]
    memory: MemorySummary
    about: list[str]
    remarks: list[str]

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide summary --json` prints."""
        memory = asdict(self.memory)
        memory["pools"] = {pool: {"peak_bytes": peak} for pool, peak in self.memory.pools.items()}
        return {
            "iterations": self.iterations,
            "warmup_iterations": self.warmup_iterations,
            "ranks": self.ranks,
            "iteration_ms": self.iteration_ms,
            "phases": [asdict(phase) for phase in self.phases],
            "transfers": {way: asdict(transfer) for way, transfer in self.transfers.items()},
            "memory": memory,
            "remarks": self.remarks,
        }

    def to_pandas(self) -> pd.DataFrame:
        """A row per phase, with the fields of `PhaseSummary` as columns."""
        return to_frame(self.phases, PhaseSummary)


def summarize(trace: Trace) -> Summary:
    """Summarize a trace. Medians leave the warm-up out."""
    cuts = {rank: intervals(trace, rank) for rank in trace.ranks}
    numbers, warmup = counted(trace)
    pool = main_pool(trace)
    slowest = slowest_times(trace)
    total = median_ms(trace, "iteration")
    peaks = _stacked([phase_peaks(trace, rank, pool) for rank in trace.ranks] if pool else [], numbers)
    free = _free(trace, pool, numbers)
    moved = {way: _stacked([phase_bytes(trace, rank, way) for rank in trace.ranks], numbers) for way in ("h2d", "d2h")}
    phases = []
    for phase in PHASES:
        times = slowest[phase]
        median = median_ms(trace, phase)
        phases.append(
            PhaseSummary(
                phase=phase,
                count=_count(phase, list(cuts.values())),
                median_ms=median,
                p95_ms=float(np.percentile(times, 95)) if median is not None else None,
                peak_bytes=_whole(_median(peaks[phase])),
                min_free_bytes=_whole(_median(free[phase])),
                h2d_bytes=_whole(_median(moved["h2d"][phase])),
                d2h_bytes=_whole(_median(moved["d2h"][phase])),
                share=float(times.sum() / slowest["iteration"].sum()) if median is not None and total else None,
            )
        )
    return Summary(
        iterations=len(numbers) + warmup,
        warmup_iterations=warmup,
        ranks=len(trace.ranks),
        iteration_ms=total,
        phases=phases,
        transfers={way: _transfers(trace, way) for way in ("h2d", "d2h")},
        memory=_memory(trace, pool),
        about=_about(trace),
        remarks=_remarks(trace),
    )


def _stacked(tables: list[pd.DataFrame | None], counted: list[int]) -> pd.DataFrame:
    """The counted iterations of all ranks, one below the other."""
    known = [table[table.index.isin(counted)] for table in tables if table is not None]
    return pd.concat(known) if known else pd.DataFrame(columns=list(PHASES), dtype=float)


def _free(trace: Trace, pool: str | None, counted: list[int]) -> pd.DataFrame:
    tables: list[pd.DataFrame | None] = []
    for rank in trace.ranks:
        capacity = capacity_bytes(trace, rank)
        tables.append(capacity - phase_peaks(trace, rank, pool) if pool and capacity is not None else None)
    return _stacked(tables, counted)


def _count(phase: str, cuts: list[Any]) -> int:
    if phase == "other":
        return max((len(cut.spans) for cut in cuts), default=0)
    rows = [cut.phases[cut.phases["phase"] == phase] for cut in cuts]
    return max((len(r[["iteration", "micro_step"]].drop_duplicates()) for r in rows), default=0)


def _transfers(trace: Trace, direction: str) -> TransferSummary:
    recorded = [rank for rank in trace.ranks if trace.rank(rank).get("transfers_recorded")]
    if not recorded:
        return TransferSummary(None, None, None)
    tables = [trace.transfers(rank) for rank in recorded]
    tables = [table[table["direction"] == direction] for table in tables]
    busy = sum(union_length(t["start_ns"].to_numpy(np.int64), t["end_ns"].to_numpy(np.int64)) for t in tables)
    rows = pd.concat(tables)
    unknown = len(rows) and rows["bytes"].isna().all()
    return TransferSummary(len(rows), None if unknown else int(rows["bytes"].sum()), busy / 1e6)


def _memory(trace: Trace, pool: str | None) -> MemorySummary:
    peaks: dict[str, int] = {}
    for rank in trace.ranks:
        for name in trace.memory(rank)["pool"].unique():
            _, sizes = memory_line(trace, rank, name)
            peaks[name] = max(peaks.get(name, 0), int(sizes.max()))
    capacity = capacity_bytes(trace, trace.ranks[0]) if trace.ranks else None
    return MemorySummary(capacity, peaks.get(pool or ""), pool, dict(sorted(peaks.items())))


def _about(trace: Trace) -> list[str]:
    """The job in a few lines: device, model, optimizer."""
    lines = []
    if command := trace.meta.get("command"):
        lines.append(f"command: {command_text(command)}")
    for entry in trace.meta["ranks"][:1]:
        device = first_device(trace, entry["rank"])
        if device.get("name"):
            torch = f", torch {entry['torch']}" if entry.get("torch") else ""
            lines.append(f"device: {device['name']} ({device.get('device')}){torch}")
        model = entry.get("model") or {}
        if model.get("params"):
            names = "".join(f"{name}, " for name in model.get("classes") or [])
            kinds = f" ({', '.join(sorted(model['dtypes']))})" if model.get("dtypes") else ""
            lines.append(f"model: {names}{model['params']:,} parameters on this rank{kinds}")
        for optimizer in entry.get("optimizers") or []:
            params = f", {optimizer['params']:,} parameters" if optimizer.get("params") is not None else ""
            state = f", state {optimizer['state_bytes'] / 2**20:,.1f} MiB" if "state_bytes" in optimizer else ""
            lines.append(f"optimizer: {optimizer.get('class', 'unknown')}{params}{state}")
    return lines


def command_text(command: list[Any], longest: int = 110) -> str:
    """A job's command as people know it: from its script on, and not longer than a line."""
    words = [str(word) for word in command]
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), 0)
    text = shlex.join(words if len(shlex.join(words)) <= longest else words[script:])
    return text if len(text) <= longest else text[: longest - 2] + " …"


def _remarks(trace: Trace) -> list[str]:
    """What the figures do not show by themselves."""
    link = any(len(trace.link(rank)) for rank in trace.ranks)
    copies = any(trace.rank(rank).get("transfers_recorded") for rank in trace.ranks)
    remarks = []
    if not link and not copies:
        remarks.append("no GPU link was recorded" + ("" if _has_gpu(trace) else " (this job ran on the CPU)"))
    elif not copies:
        remarks.append("link bytes are from sampled counters; `ebbtide profile --transfers` records each copy")
    if trace.meta.get("state") == "recording":
        remarks.append("this trace was not finished: its recording was cut off, or still goes on")
    return remarks


def _has_gpu(trace: Trace) -> bool:
    return any(d.get("kind") == "cuda" for rank in trace.ranks for d in trace.rank(rank).get("devices") or [])


def _median(values: pd.Series[float]) -> float | None:
    known = values.dropna()
    return float(known.median()) if len(known) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
