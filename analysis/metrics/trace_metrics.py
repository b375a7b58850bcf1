"""What the rules ask of a trace, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.deepspeed import DeepSpeed, deepspeed_of
from ebbtide.analysis.metrics.devices import capacity_bytes, first_device, main_pool
from ebbtide.analysis.metrics.iterations import counted, intervals, median_ms
from ebbtide.analysis.metrics.link import Link, PhaseLink, link_use
from ebbtide.analysis.metrics.link_throughput import copies
from ebbtide.analysis.metrics.memory import Memory, memory_use
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.metrics.substeps.aggregate import SubStep
from ebbtide.analysis.metrics.substeps.breakdown import SubSteps, sub_steps
from ebbtide.analysis.metrics.summary import Summary, summarize
from ebbtide.analysis.timeseries.step_functions import union_length
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace

STATE_BYTES = 12


@dataclass(frozen=True)
class CopiesOf:
    """Copies of one kind, means over the counted iterations."""

    count: int
    bytes: float | None
    busy_ms: float


class Study:
    """A trace's figures, over the counted iterations. What was not recorded is None."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.trace)

    @cached_property
    def link(self) -> Link:
        return link_use(self.trace)

    @cached_property
    def memory(self) -> Memory:
        return memory_use(self.trace)

    @property
    def iteration_ms(self) -> float | None:
        return median_ms(self.trace, "iteration")

    def ms(self, phase: str) -> float | None:
        """Median milliseconds of a phase, of the slowest rank."""
        return median_ms(self.trace, phase)

    @cached_property
    def has_gpu(self) -> bool:
        """Whether the job ran on a GPU: only then are there a link and memory of a device."""
        return any(first_device(self.trace, rank).get("kind") == "cuda" for rank in self.trace.ranks)

    @cached_property
    def has_copies(self) -> bool:
        return any(self.trace.rank(rank).get("transfers_recorded") for rank in self.trace.ranks)

    @cached_property
    def has_counters(self) -> bool:
        return any(entry.source not in (None, "copies") for entry in self.link.ranks)

    @property
    def world_size(self) -> int:
        return max(len(self.trace.ranks), self.entry.get("world_size") or 1)

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The meta of the first rank."""
        return self.trace.rank(self.trace.ranks[0]) if self.trace.ranks else {}

    @cached_property
    def capacity_bytes(self) -> int | None:
        return capacity_bytes(self.trace, self.trace.ranks[0]) if self.trace.ranks else None

    @cached_property
    def params(self) -> int | None:
        """Parameters whose state the first rank holds."""
        counts = [o.get("params") for o in self.entry.get("optimizers") or []]
        known = [count for count in counts if count]
        return sum(known) if known else (self.entry.get("model") or {}).get("params")

    @cached_property
    def deepspeed(self) -> DeepSpeed | None:
        return deepspeed_of(self.trace)

    @property
    def zero(self) -> dict[str, Any]:
        """The section zero_optimization of a DeepSpeed configuration, empty where there is none."""
        return self.deepspeed.zero if self.deepspeed is not None else {}

    @cached_property
    def sub_steps(self) -> SubSteps | None:
        """None where none were recorded."""
        try:
            return sub_steps(self.trace, by_subgroup=False)
        except TraceError:
            return None

    def sub_step(self, name: str, resources: tuple[str, ...] = ("host", "cpu")) -> SubStep | None:
        """A sub-step that DeepSpeed ran on the host: of the rank that it took longest."""
        # A look at the names is quick, the figures of all sub-steps are not.
        if not any((self.trace.ops(rank)["name"] == name).any() for rank in self.trace.ranks):
            return None
        if self.sub_steps is None or not self.sub_steps.tiles:
            return None
        found = [step for step in self.sub_steps.steps if step.name == name and step.resource in resources]
        return max(found, key=lambda step: step.median_ms, default=None)

    @cached_property
    def offloaded(self) -> bool | None:
        """Whether optimizer state lives in host memory while the job trains on a GPU."""
        if not self.has_gpu:
            return False
        if self.deepspeed is not None and isinstance(self.zero.get("offload_optimizer"), dict):
            return self.deepspeed.offload.get("device") in ("cpu", "nvme") and self.deepspeed.cpu_share > 0
        optimizers = self.entry.get("optimizers") or []
        if any("CPU" in str(o.get("class")) for o in optimizers):
            return True
        places = {str(place).partition(":")[0] for o in optimizers for place in o.get("state_devices") or []}
        # Torch's optimizers count their steps on the CPU: state in both places may be no more than that.
        return places == {"cpu"} if len(places) == 1 else None

    @cached_property
    def offloaded_params(self) -> float | None:
        """Parameters whose state the first rank holds in host memory."""
        share = self.deepspeed.cpu_share if self.deepspeed is not None else 1.0
        return self.params * share if self.params is not None and self.offloaded else None

    @cached_property
    def checkpointing(self) -> bool | None:
        """Whether forwards are recomputed in the backward."""
        return self.deepspeed.checkpointing if self.deepspeed is not None else None

    def phase_link(self, phase: str, direction: str) -> PhaseLink | None:
        """One direction in a phase: of the rank that moved most."""
        rows = [use for use in self.link.phases if (use.phase, use.direction) == (phase, direction)]
        known = [use for use in rows if use.bytes is not None]
        return max(known, key=lambda use: use.bytes or 0.0, default=None)

    def both_ways(self, phase: str) -> list[tuple[PhaseLink, PhaseLink]]:
        """(h2d, d2h) of a phase, of each rank."""
        uses = {(use.rank, use.direction): use for use in self.link.phases if use.phase == phase}
        ranks = sorted({rank for rank, _ in uses})
        return [(uses[rank, "h2d"], uses[rank, "d2h"]) for rank in ranks]

    @cached_property
    def counted(self) -> list[int]:
        return counted(self.trace)[0]

    @cached_property
    def counted_copies(self) -> pd.DataFrame:
        """All ranks' copies in the counted iterations: the table `transfers` with rank, phase and iteration."""
        tables = []
        for rank in self.trace.ranks:
            pieces = intervals(self.trace, rank).with_other
            # A phase of no time stands before the one that begins with it, and stays there.
            pieces = pieces.sort_values("start_ns", kind="stable", ignore_index=True)
            rows = copies(self.trace, rank, None)
            place = np.searchsorted(pieces["start_ns"].to_numpy(), rows["start_ns"].to_numpy(), side="right") - 1
            rows, place = rows[place >= 0], place[place >= 0]
            inside = rows["start_ns"].to_numpy() < pieces["end_ns"].to_numpy()[place]
            of = pieces.iloc[place].reset_index(drop=True)
            rows = rows.reset_index(drop=True).assign(rank=rank, phase=of["phase"], iteration=of["iteration"])
            tables.append(rows[inside & rows["iteration"].isin(self.counted)])
        return pd.concat(tables)

    def copies_of(self, direction: str, host_memory: str, phase: str | None = None) -> CopiesOf | None:
        """The copies of one kind per iteration, in one phase or all, of the rank with most of them; None: none."""
        rows = self.counted_copies
        rows = rows[(rows["direction"] == direction) & (rows["host_memory"] == host_memory)]
        if phase is not None:
            rows = rows[rows["phase"] == phase]
        found = []
        for _, group in rows.groupby("rank"):
            busy = union_length(group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64))
            count, sized = len(self.counted), group["bytes"].dropna()
            size = int(sized.sum()) / count if len(sized) else None
            found.append(CopiesOf(round(len(group) / count), size, busy / 1e6 / count))
        return max(found, key=lambda kind: kind.busy_ms, default=None)

    @cached_property
    def peak_bytes_per_s(self) -> float | None:
        return next((entry.peak_bytes_per_s for entry in self.link.ranks if entry.peak_bytes_per_s), None)

    def least_gap(self, name: str, phase: str | None = None) -> list[int]:
        """What lies between two memory lines all through a phase, or through all of them: bytes, of each rank that
        tells."""
        rows = [g for g in self.memory.gaps if g.gap == name and phase in (None, g.phase)]
        return [min(g.low_bytes for g in rows if g.rank == rank) for rank in sorted({g.rank for g in rows})]

    @cached_property
    def always_free_bytes(self) -> int | None:
        """What is free on the device at every moment of every counted iteration, on every rank."""
        pool = main_pool(self.trace)
        free = []
        for rank in self.trace.ranks:
            capacity = capacity_bytes(self.trace, rank)
            if pool is None or capacity is None:
                return None
            peaks = phase_peaks(self.trace, rank, pool)
            free.append(capacity - peaks[peaks.index.isin(self.counted)].max(axis=None))
        known = [size for size in free if not np.isnan(size)]
        return int(min(known)) if known else None

    def pool_peak(self, pool: str) -> int | None:
        return self.summary.memory.pools.get(pool)


def at_most(*milliseconds: float) -> float:
    """A worth: never negative, in ms."""
    return float(max(0.0, np.min(milliseconds)))
