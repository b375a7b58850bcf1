"""The figures of a job and of its ranks.

Each is computed when it is first asked for, and once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.analysis.metrics.devices import free_pool, pool_peaks
from ebbtide.analysis.metrics.framework_setup import FrameworkSetup, framework_setup
from ebbtide.analysis.metrics.gpu_state import GpuState, gpu_state
from ebbtide.analysis.metrics.iteration_stats import Iterations, compare_iterations
from ebbtide.analysis.metrics.iterations import (
    median_ms,
    on_device_clock,
    steady_iterations,
)
from ebbtide.analysis.metrics.link import (
    CopyStats,
    LinkUse,
    PhaseLink,
    SteadyCopies,
    copy_stats,
    link_use,
    steady_copies,
)
from ebbtide.analysis.metrics.memory import MemoryUse, memory_use
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.metrics.rank import RankMetrics
from ebbtide.analysis.metrics.storage_use import StorageUse, storage_use
from ebbtide.errors import UserError
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import RankInfo
from ebbtide.units import ByteCount, byte_count

if TYPE_CHECKING:
    # The others are imported when they are asked for: they load pandas, or read by
    # other processes.
    import pandas as pd

    from ebbtide.analysis.metrics.activity.activity import GpuActivity
    from ebbtide.analysis.metrics.activity.collectives import CollectiveSkew
    from ebbtide.analysis.metrics.advice import Adviser
    from ebbtide.analysis.metrics.drift import Drift
    from ebbtide.analysis.metrics.holders.holders import Holders
    from ebbtide.analysis.metrics.ranks.by_rank import RankTable
    from ebbtide.analysis.metrics.ranks.comparison import RankDifferences
    from ebbtide.analysis.metrics.substeps.breakdown import SubStep, SubSteps
    from ebbtide.analysis.metrics.summary import Summary
    from ebbtide.analysis.metrics.windows import Windows


def _several(ranks: Sequence[int] | int | None) -> Sequence[int] | None:
    return [int(ranks)] if isinstance(ranks, int | np.integer) else ranks


class JobMetrics:
    """The figures of a trace over its steady iterations. Figures that were not recorded
    are None.

    Medians leave the first two iterations out where there are five or more. Every
    result is a frozen dataclass with `as_json()`, the object that the command of its
    name prints with `--json`, and `to_pandas()`, its main table. Methods take the ranks
    to look at, or one of them (None: all), or one rank (None: the first), and raise
    TraceError for a rank that is not in the trace."""

    def __init__(self, trace: Trace, adviser: Adviser | None = None) -> None:
        """Take a trace, from `ebbtide.open_trace` or from an importer. Nothing is
        computed yet.

        Args:
            adviser: Recommends settings by simulation to rules that advise some; None:
                they estimate them.
        """
        self.trace = trace
        self.adviser = adviser
        self._ranks: dict[int, RankMetrics] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.trace!r})"

    def rank(self, rank: int) -> RankMetrics:
        """Return the figures of a rank."""
        return self._ranks.setdefault(rank, RankMetrics(self.trace, rank))

    @property
    def by_rank(self) -> list[RankMetrics]:
        """The figures of each rank."""
        return [self.rank(rank) for rank in self.trace.ranks]

    def summary(self) -> Summary:
        """Time, memory, link use and the state of the GPUs in each phase."""
        return self._summary

    @cached_property
    def _summary(self) -> Summary:
        from ebbtide.analysis.metrics.summary import summarize

        return summarize(self.trace)

    def windows(
        self, min_bytes: ByteCount = 2**30, ranks: Sequence[int] | int | None = None
    ) -> Windows:
        """Windows of free memory of the device.

        `missing` says why there are none where memory was not recorded.

        Times are the GPU's where it has any, as in `summary`.

        Args:
            min_bytes: Least free memory of a window, bytes, or text such as `4GiB`.
            ranks: Ranks to look at, or one; None: all.

        Raises:
            SizeError: `min_bytes` is no size.
            TraceError: A rank is not in the trace.
        """
        from ebbtide.analysis.metrics.windows import find_windows

        least = int(byte_count(min_bytes, "min_bytes"))
        return find_windows(self._on_device_clock, least, _several(ranks))

    @cached_property
    def _on_device_clock(self) -> Trace:
        return on_device_clock(self.trace)

    def memory(self, ranks: Sequence[int] | int | None = None) -> MemoryUse:
        """Every memory pool in each phase, and the differences between pools."""
        return memory_use(self.trace, _several(ranks))

    def link(self, ranks: Sequence[int] | int | None = None) -> LinkUse:
        """Bytes, rates and busy time of the link, per phase and direction."""
        return link_use(self.trace, _several(ranks))

    def gpu(self, ranks: Sequence[int] | int | None = None) -> GpuState:
        """Utilization, power, clocks and temperature of the GPUs, per phase."""
        return gpu_state(self.trace, _several(ranks))

    def activity(self, rank: int | None = None) -> GpuActivity:
        """Compute, communication, copies and idle time of the first GPU of a rank."""
        from ebbtide.analysis.metrics.activity.activity import gpu_activity

        return gpu_activity(self.trace, rank)

    def holders(
        self,
        rank: int | None = None,
        at_ns: int | None = None,
        device: str | None = None,
    ) -> Holders | None:
        """Holders of the memory of a device at a time, by category, module and call
        site; None if it was not recorded.

        Args:
            rank: The rank; None: the first one.
            at_ns: The time, ns; None: the time of the largest use.
            device: The device; None: the rank's first one.

        Raises:
            TraceError: The rank is not in the trace.
        """
        from ebbtide.analysis.metrics.holders.holders import holders_at

        return holders_at(
            self.trace, self.trace.ranks[0] if rank is None else rank, at_ns, device
        )

    def iterations(self, ranks: Sequence[int] | int | None = None) -> Iterations:
        """Milliseconds of every iteration and phase.

        Also how they spread over iterations and ranks.
        """
        return compare_iterations(self.trace, _several(ranks))

    def ranks(self) -> RankTable:
        """Medians of each rank, and the ranks that differ with their causes."""
        from ebbtide.analysis.metrics.ranks.by_rank import rank_table

        return rank_table(self.trace)

    def substeps(
        self, ranks: Sequence[int] | int | None = None, by_subgroup: bool = True
    ) -> SubSteps:
        """Sub-steps of the update of a DeepSpeed job or of a simulated schedule.

        There are none where they were not recorded.
        """
        from ebbtide.analysis.metrics.substeps.breakdown import sub_steps

        return sub_steps(self.trace, _several(ranks), by_subgroup)

    @property
    def without_gradients_ms(self) -> float | None:
        """Time of `other` in which forwards without gradients run; None where none were
        recorded."""
        from ebbtide.analysis.metrics.substeps.operations import without_gradients_ms

        return without_gradients_ms(self.trace)

    @property
    def rank_differences(self) -> RankDifferences:
        """The ranks that differ from the others."""
        from ebbtide.analysis.metrics.ranks.comparison import rank_differences

        return rank_differences(self.trace)

    @cached_property
    def drifts(self) -> list[Drift]:
        """The quantities that change in the course of the run."""
        from ebbtide.analysis.metrics.drift import find_drifts

        return find_drifts(self.trace)

    @cached_property
    def collective_skew(self) -> CollectiveSkew | None:
        """Waiting of the ranks for each other; None unless several recorded the same
        collectives."""
        from ebbtide.analysis.metrics.activity.collectives import collective_skew

        return collective_skew(self.trace)

    def iteration_activity(self, phase: str | None = None) -> pd.DataFrame:
        """Return GPU time of the median iteration, or of one of its phases, with a row
        per rank with recorded kernels."""
        from ebbtide.analysis.metrics.activity.phase_activity import iteration_activity

        return iteration_activity(self.trace, phase)

    @cached_property
    def _link(self) -> LinkUse:
        return self.link()

    @cached_property
    def storage(self) -> list[StorageUse]:
        """Use of storage by each rank and direction; empty where none was recorded."""
        return storage_use(self.trace)

    @property
    def iteration_ms(self) -> float | None:
        """Median milliseconds of an iteration on the slowest rank."""
        return median_ms(self.trace, "iteration")

    def phase_ms(self, phase: str) -> float | None:
        """Return the median ms of a phase, `other` or `iteration` on the slowest rank.

        Raises UserError for another name.
        """
        if phase not in (*ITERATION_PARTS, "iteration"):
            raise UserError(
                f"there is no phase {phase!r}: choose from "
                f"{', '.join(ITERATION_PARTS)}, iteration"
            )
        return median_ms(self.trace, phase)

    @property
    def is_recorded(self) -> bool:
        """Whether `ebbtide profile` recorded the job on its own host."""
        return self.trace.meta.source == "recorded"

    @cached_property
    def has_gpu(self) -> bool:
        """Whether the job ran on a GPU. Only then are there a link and device
        memory."""
        return any(rank.device.kind not in (None, "cpu") for rank in self.by_rank)

    @cached_property
    def has_copies(self) -> bool:
        """Whether each copy was recorded on any rank."""
        return any(
            self.trace.rank(rank).transfers_recorded for rank in self.trace.ranks
        )

    @cached_property
    def has_counters(self) -> bool:
        """Whether the link's counters were sampled on any rank."""
        return any(entry.source not in (None, "copies") for entry in self._link.ranks)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, also of ranks that were not recorded if their
        number is known."""
        return max(len(self.trace.ranks), self.entry.world_size or 1)

    @cached_property
    def entry(self) -> RankInfo:
        """Metadata of the first rank."""
        return (
            self.trace.rank(self.trace.ranks[0])
            if self.trace.ranks
            else RankInfo(rank=0)
        )

    @cached_property
    def capacity_bytes(self) -> int | None:
        """Memory of the first rank's device."""
        return self.by_rank[0].capacity_bytes if self.trace.ranks else None

    @cached_property
    def params(self) -> int | None:
        """Parameters whose state the first rank holds."""
        return (
            sum(optimizer.params or 0 for optimizer in self.entry.optimizers)
            or self.entry.model.params
        )

    @cached_property
    def micro_steps(self) -> int | None:
        """Micro-steps of an iteration on the first rank; None where no iteration was
        recorded."""
        phases = self.trace.phases(self.trace.ranks[0])
        numbers = phases.loc[phases["iteration"].notna(), "micro_step"]
        return int(numbers.max()) + 1 if len(numbers) else None

    @cached_property
    def setup(self) -> FrameworkSetup | None:
        """Setup of the framework that offloads the optimizer; None of other jobs."""
        return framework_setup(self.trace)

    @cached_property
    def _substeps(self) -> SubSteps:
        return self.substeps(by_subgroup=False)

    def sub_step(
        self, name: str, resources: tuple[str, ...] = ("host", "cpu")
    ) -> SubStep | None:
        """Return a sub-step that DeepSpeed ran on the host, on the rank where it took
        longest."""
        # Comparing names is fast; computing the figures of all sub-steps is not.
        if not any(rank.has_operation(name) for rank in self.by_rank):
            return None
        if not self._substeps.tiles:
            return None
        steps = [
            step
            for step in self._substeps.steps
            if step.name == name and step.resource in resources
        ]
        return max(steps, key=lambda step: step.median_ms, default=None)

    @cached_property
    def offloaded(self) -> bool | None:
        """Whether optimizer state is in host memory while the job trains on a GPU."""
        if not self.has_gpu:
            return False
        if self.setup is not None and self.setup.offloads is not None:
            return self.setup.offloads
        optimizers = self.entry.optimizers
        if any("CPU" in (optimizer.class_name or "") for optimizer in optimizers):
            return True
        devices = {
            device.partition(":")[0]
            for optimizer in optimizers
            for device in optimizer.state_devices
        }
        # Torch's optimizers keep step counts on the CPU: state on both devices may be
        # no more than that.
        return devices == {"cpu"} if len(devices) == 1 else None

    @cached_property
    def offloaded_params(self) -> float | None:
        """Parameters whose state the first rank keeps in host memory; None if state is
        not offloaded."""
        share = self.setup.cpu_share if self.setup is not None else 1.0
        return (
            self.params * share if self.params is not None and self.offloaded else None
        )

    @cached_property
    def checkpointing(self) -> bool | None:
        """Whether forwards are recomputed in the backward."""
        configured = self.setup.checkpointing if self.setup is not None else None
        return self.entry.model.checkpointing if configured is None else configured

    def phase_link(self, phase: str, direction: str) -> PhaseLink | None:
        """Return one direction of the link in a phase, of the rank that moved most."""
        rows = [
            use
            for use in self._link.phases
            if (use.phase, use.direction) == (phase, direction)
        ]
        recorded = [use for use in rows if use.bytes is not None]
        return max(recorded, key=lambda use: use.bytes or 0.0, default=None)

    @staticmethod
    def copy_ms(up: PhaseLink, down: PhaseLink) -> float:
        """Return the time in which copies of any direction run in a phase."""
        busy_ms = (up.busy_ms or 0.0) + (down.busy_ms or 0.0)
        return busy_ms - (up.both_ms or 0.0)

    def both_directions(self, phase: str) -> list[tuple[PhaseLink, PhaseLink]]:
        """Return the link in a phase, h2d and d2h, of each rank."""
        uses = {
            (use.rank, use.direction): use
            for use in self._link.phases
            if use.phase == phase
        }
        return [
            (uses[rank, "h2d"], uses[rank, "d2h"])
            for rank in sorted({rank for rank, _ in uses})
        ]

    @property
    def steady_iterations(self) -> list[int]:
        """Numbers of the iterations after the warm-up."""
        return steady_iterations(self.trace).numbers

    @cached_property
    def steady_copies(self) -> SteadyCopies:
        """Copies of each rank in its `copied_iterations`, with their phases."""
        return steady_copies(self.trace)

    def copy_stats(
        self, direction: str, host_memory: str, phase: str | None = None
    ) -> CopyStats | None:
        """Return the copies of one kind in a phase, or in all if it is None, on the
        rank where they took longest."""
        return copy_stats(self.trace, self.steady_copies, direction, host_memory, phase)

    @cached_property
    def peak_bytes_per_s(self) -> float | None:
        """Peak rate of the link in one direction, on the first rank for which it is
        known."""
        return next(
            (
                entry.peak_bytes_per_s
                for entry in self._link.ranks
                if entry.peak_bytes_per_s
            ),
            None,
        )

    def min_gap_bytes(self, gap: str, phase: str | None = None) -> list[int]:
        """Return the smallest value of a memory gap (`Gap.gap`) of each rank, in a
        phase, or in all if it is None."""
        rows = [
            g for g in self.memory().gaps if g.gap == gap and phase in (None, g.phase)
        ]
        return [
            min(g.low_bytes for g in rows if g.rank == rank)
            for rank in sorted({g.rank for g in rows})
        ]

    @cached_property
    def free_pool(self) -> str | None:
        """The pool that free memory is computed from."""
        return free_pool(self.trace)

    @cached_property
    def always_free_bytes(self) -> int | None:
        """Device memory that is free at every moment, on every rank.

        Moments are of every steady iteration; without iterations, of the trace.
        """
        free = [np.empty(0)]
        for rank in self.by_rank:
            if self.free_pool is None or rank.capacity_bytes is None:
                return None
            if self.steady_iterations:
                peaks = phase_peaks(self.trace, rank.rank, self.free_pool).only(
                    self.steady_iterations
                )
                used = peaks.largest(ITERATION_PARTS)
            else:
                used = rank.memory_timeline(self.free_pool)[1].astype(np.float64)
            free.append(rank.capacity_bytes - used[~np.isnan(used)])
        sizes = np.concatenate(free)
        return int(sizes.min()) if len(sizes) else None

    def pool_peak(self, pool: str) -> int | None:
        """Return the peak of a pool over the whole trace, bytes."""
        peaks = (pool_peaks(self.trace, rank).get(pool) for rank in self.trace.ranks)
        return max((peak for peak in peaks if peak is not None), default=None)
