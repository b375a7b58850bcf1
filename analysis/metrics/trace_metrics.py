"""The figures of a trace that findings, replay and calibration read, each computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.deepspeed import DeepSpeedSetup, deepspeed_of
from ebbtide.analysis.metrics.devices import capacity_bytes, first_device, free_pool, memory_timeline
from ebbtide.analysis.metrics.iterations import intervals, median_ms, steady_iterations
from ebbtide.analysis.metrics.link import LinkUse, PhaseLink, link_use
from ebbtide.analysis.metrics.link_throughput import copied_iterations, copies
from ebbtide.analysis.metrics.memory import MemoryUse, memory_use
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.metrics.storage import StorageUse, storage_use
from ebbtide.analysis.metrics.substeps.aggregate import SubStep
from ebbtide.analysis.metrics.substeps.breakdown import SubSteps, sub_steps
from ebbtide.analysis.metrics.substeps.operations import op_names
from ebbtide.analysis.metrics.summary import Summary, summarize
from ebbtide.analysis.timeseries.step_functions import union_length
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import RankInfo


@dataclass(frozen=True)
class CopyStats:
    """Copies of one kind, means over the steady iterations.

    Attributes:
        count: Copies per iteration.
        bytes: Bytes per iteration of the copies whose size was recorded; None if there is none.
        busy_ms: Time per iteration in which at least one of them ran.
    """

    count: int
    bytes: float | None
    busy_ms: float


@dataclass(frozen=True)
class DirectionPair:
    """The link in one phase of one rank, both directions."""

    h2d: PhaseLink
    d2h: PhaseLink


class TraceMetrics:
    """The figures of a trace over its steady iterations. Figures that were not recorded are None."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def summary(self) -> Summary:
        """The figures of `ebbtide summary`."""
        return summarize(self.trace)

    @cached_property
    def link(self) -> LinkUse:
        """The figures of `ebbtide link`."""
        return link_use(self.trace)

    @cached_property
    def memory(self) -> MemoryUse:
        """The figures of `ebbtide memory`."""
        return memory_use(self.trace)

    @cached_property
    def storage(self) -> list[StorageUse]:
        """Use of storage by each rank and direction; empty where none was recorded."""
        return storage_use(self.trace)

    @property
    def iteration_ms(self) -> float | None:
        """Median milliseconds of an iteration on the slowest rank."""
        return median_ms(self.trace, "iteration")

    def phase_ms(self, phase: str) -> float | None:
        """Return the median milliseconds of a phase on the slowest rank."""
        return median_ms(self.trace, phase)

    @property
    def is_recorded(self) -> bool:
        """Whether `ebbtide profile` recorded the job on its own host."""
        return self.trace.meta.source == "recorded"

    @cached_property
    def has_gpu(self) -> bool:
        """Whether the job ran on a GPU. Only then are there a link and device memory."""
        return any(first_device(self.trace, rank).kind == "cuda" for rank in self.trace.ranks)

    @cached_property
    def has_copies(self) -> bool:
        """Whether each copy was recorded on any rank."""
        return any(self.trace.rank(rank).transfers_recorded for rank in self.trace.ranks)

    @cached_property
    def has_counters(self) -> bool:
        """Whether the link's counters were sampled on any rank."""
        return any(entry.source not in (None, "copies") for entry in self.link.ranks)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, including ranks that were not recorded where their number is known."""
        return max(len(self.trace.ranks), self.entry.world_size or 1)

    @cached_property
    def entry(self) -> RankInfo:
        """Metadata of the first rank."""
        return self.trace.rank(self.trace.ranks[0]) if self.trace.ranks else RankInfo(rank=0)

    @cached_property
    def capacity_bytes(self) -> int | None:
        """Memory of the first rank's device."""
        return capacity_bytes(self.trace, self.trace.ranks[0]) if self.trace.ranks else None

    @cached_property
    def params(self) -> int | None:
        """Parameters whose state the first rank holds."""
        counts = [optimizer.params for optimizer in self.entry.optimizers]
        recorded = [count for count in counts if count]
        return sum(recorded) if recorded else self.entry.model.params

    @cached_property
    def micro_steps(self) -> int | None:
        """Micro-steps of an iteration on the first rank; None where no iteration was recorded."""
        phases = self.trace.phases(self.trace.ranks[0])
        numbers = phases.loc[phases["iteration"].notna(), "micro_step"]
        return int(numbers.max()) + 1 if len(numbers) else None

    @cached_property
    def deepspeed(self) -> DeepSpeedSetup | None:
        """Setup of the DeepSpeed job; None for other jobs."""
        return deepspeed_of(self.trace)

    @property
    def zero(self) -> dict[str, Any]:
        """Section `zero_optimization` of the DeepSpeed configuration; empty if not recorded."""
        return self.deepspeed.zero_config if self.deepspeed is not None else {}

    @cached_property
    def sub_steps(self) -> SubSteps:
        """The figures of `ebbtide steps`, without subgroups."""
        return sub_steps(self.trace, by_subgroup=False)

    def sub_step(self, name: str, resources: tuple[str, ...] = ("host", "cpu")) -> SubStep | None:
        """Return a sub-step that DeepSpeed ran on the host, of the rank on which it took longest."""
        # Comparing names is fast; computing the figures of all sub-steps is not.
        if not any(name in op_names(self.trace, rank) for rank in self.trace.ranks):
            return None
        if not self.sub_steps.tiles:
            return None
        steps = [step for step in self.sub_steps.steps if step.name == name and step.resource in resources]
        return max(steps, key=lambda step: step.median_ms, default=None)

    @cached_property
    def offloaded(self) -> bool | None:
        """Whether optimizer state is in host memory while the job trains on a GPU."""
        if not self.has_gpu:
            return False
        if self.deepspeed is not None and isinstance(self.zero.get("offload_optimizer"), dict):
            return self.deepspeed.offload_config.get("device") in ("cpu", "nvme") and self.deepspeed.cpu_share > 0
        optimizers = self.entry.optimizers
        if any("CPU" in (optimizer.class_name or "") for optimizer in optimizers):
            return True
        devices = {device.partition(":")[0] for optimizer in optimizers for device in optimizer.state_devices}
        # Torch's optimizers keep step counts on the CPU: state on both devices may be no more than that.
        return devices == {"cpu"} if len(devices) == 1 else None

    @cached_property
    def offloaded_params(self) -> float | None:
        """Parameters whose state the first rank keeps in host memory; None if state is not offloaded."""
        share = self.deepspeed.cpu_share if self.deepspeed is not None else 1.0
        return self.params * share if self.params is not None and self.offloaded else None

    @cached_property
    def checkpointing(self) -> bool | None:
        """Whether forwards are recomputed in the backward."""
        return self.deepspeed.info.activation_checkpointing if self.deepspeed is not None else None

    def phase_link(self, phase: str, direction: str) -> PhaseLink | None:
        """Return one direction of the link in a phase, of the rank that moved most."""
        rows = [use for use in self.link.phases if (use.phase, use.direction) == (phase, direction)]
        recorded = [use for use in rows if use.bytes is not None]
        return max(recorded, key=lambda use: use.bytes or 0.0, default=None)

    def both_directions(self, phase: str) -> list[DirectionPair]:
        """Return both directions of the link in a phase, of each rank."""
        uses = {(use.rank, use.direction): use for use in self.link.phases if use.phase == phase}
        ranks = sorted({rank for rank, _ in uses})
        return [DirectionPair(uses[rank, "h2d"], uses[rank, "d2h"]) for rank in ranks]

    @property
    def steady_iterations(self) -> list[int]:
        """Numbers of the iterations after the warm-up."""
        return steady_iterations(self.trace).numbers

    @cached_property
    def steady_copies(self) -> pd.DataFrame:
        """Copies of each rank in its `copied_iterations`: the table `transfers` with rank, phase and iteration."""
        tables: list[pd.DataFrame] = []
        for rank in self.trace.ranks:
            rows = copies(self.trace, rank, None)
            if rows.empty and tables:
                continue
            phases = intervals(self.trace, rank).with_other
            # The stable sort keeps a phase without length before the phase that begins with it.
            phases = phases.sort_values("start_ns", kind="stable", ignore_index=True)
            index = np.searchsorted(phases["start_ns"].to_numpy(), rows["start_ns"].to_numpy(), side="right") - 1
            rows, index = rows[index >= 0], index[index >= 0]
            inside = rows["start_ns"].to_numpy() < phases["end_ns"].to_numpy()[index]
            own = phases.iloc[index].reset_index(drop=True)
            rows = rows.reset_index(drop=True).assign(rank=rank, phase=own["phase"], iteration=own["iteration"])
            tables.append(rows[inside & rows["iteration"].isin(copied_iterations(self.trace, rank))])
        return pd.concat(tables)

    def copy_stats(self, direction: str, host_memory: str, phase: str | None = None) -> CopyStats | None:
        """Return the copies of one kind in a phase, or (None) in all, of the rank on which they took longest.

        Args:
            direction: `h2d` or `d2h`.
            host_memory: `pinned` or `pageable`.
            phase: A phase; None: all.
        """
        rows = self.steady_copies
        rows = rows[(rows["direction"] == direction) & (rows["host_memory"] == host_memory)]
        if phase is not None:
            rows = rows[rows["phase"] == phase]
        stats = []
        for rank, group in rows.groupby("rank"):
            busy = union_length(group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64))
            count, sized = len(copied_iterations(self.trace, int(rank))), group["bytes"].dropna()
            size = int(sized.sum()) / count if len(sized) else None
            stats.append(CopyStats(round(len(group) / count), size, busy / 1e6 / count))
        return max(stats, key=lambda kind: kind.busy_ms, default=None)

    @cached_property
    def peak_bytes_per_s(self) -> float | None:
        """Peak rate of the link in one direction, of the first rank for which it is known."""
        return next((entry.peak_bytes_per_s for entry in self.link.ranks if entry.peak_bytes_per_s), None)

    def min_gap_bytes(self, gap: str, phase: str | None = None) -> list[int]:
        """Return the smallest value of a memory gap (`Gap.gap`) in a phase, or (None) in all, of each rank with it."""
        rows = [g for g in self.memory.gaps if g.gap == gap and phase in (None, g.phase)]
        return [min(g.low_bytes for g in rows if g.rank == rank) for rank in sorted({g.rank for g in rows})]

    @cached_property
    def free_pool(self) -> str | None:
        """The pool that free memory is computed from."""
        return free_pool(self.trace)

    @cached_property
    def always_free_bytes(self) -> int | None:
        """Device memory that is free at every moment of every steady iteration, on every rank; without iterations, at
        every moment of the trace."""
        free = []
        for rank in self.trace.ranks:
            capacity = capacity_bytes(self.trace, rank)
            if self.free_pool is None or capacity is None:
                return None
            if self.steady_iterations:
                peaks = phase_peaks(self.trace, rank, self.free_pool)
                largest = peaks[peaks.index.isin(self.steady_iterations)].max(axis=None)
            else:
                largest = np.max(memory_timeline(self.trace, rank, self.free_pool)[1], initial=-1)
                largest = np.nan if largest < 0 else largest
            free.append(capacity - largest)
        recorded = [size for size in free if not np.isnan(size)]
        return int(min(recorded)) if recorded else None

    def pool_peak(self, pool: str) -> int | None:
        """Return the peak of a pool over the whole trace, bytes."""
        return self.summary.memory.pools.get(pool)
