"""The public facade for analysing a trace in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    from ebbtide.analysis.findings import Findings
    from ebbtide.analysis.metrics.activity.activity import GpuActivity
    from ebbtide.analysis.metrics.gpu_state import GpuState
    from ebbtide.analysis.metrics.holders.holders import Holders
    from ebbtide.analysis.metrics.iteration_stats import Iterations
    from ebbtide.analysis.metrics.link import LinkUse
    from ebbtide.analysis.metrics.memory import MemoryUse
    from ebbtide.analysis.metrics.ranks.by_rank import RankTable
    from ebbtide.analysis.metrics.substeps.breakdown import SubSteps
    from ebbtide.analysis.metrics.summary import Summary
    from ebbtide.analysis.metrics.windows import Windows


class TraceAnalysis:
    """The figures of one trace, as the commands of the same names print them.

    Medians are over the steady iterations: the first two are left out where there are five or more. What was not
    recorded is None. Every result is a frozen dataclass with `as_json()`, the object that the command prints with
    `--json`, and `to_pandas()`, its main table.

    Example:
        >>> analysis = TraceAnalysis(ebbtide.open_trace("run.ebb"))
        >>> analysis.windows(min_bytes=4 * 2**30, ranks=[0]).to_pandas()
    """

    def __init__(self, trace: Trace) -> None:
        """Take a trace, from `ebbtide.open_trace` or from an importer. Nothing is computed yet."""
        self.trace = trace

    def __repr__(self) -> str:
        return f"TraceAnalysis({self.trace!r})"

    def summary(self) -> Summary:
        """Time, memory, link use and the state of the GPUs in each phase."""
        from ebbtide.analysis.metrics.summary import summarize

        return summarize(self.trace)

    def windows(self, min_bytes: int = 2**30, ranks: Sequence[int] | None = None) -> Windows:
        """Windows of free memory of the device; `missing` says why there are none where memory was not recorded.

        Args:
            min_bytes: Least free memory of a window, bytes.
            ranks: Ranks to look at; None: all.

        Raises:
            TraceError: A rank is not in the trace.
        """
        from ebbtide.analysis.metrics.windows import find_windows

        return find_windows(self.trace, min_bytes, ranks)

    def memory(self, ranks: Sequence[int] | None = None) -> MemoryUse:
        """Every memory pool in each phase, and the differences between pools.

        Args:
            ranks: Ranks to look at; None: all.

        Raises:
            TraceError: A rank is not in the trace.
        """
        from ebbtide.analysis.metrics.memory import memory_use

        return memory_use(self.trace, ranks)

    def link(self, ranks: Sequence[int] | None = None) -> LinkUse:
        """Bytes, rates and busy time of the link, per phase and direction.

        Args:
            ranks: Ranks to look at; None: all.

        Raises:
            TraceError: A rank is not in the trace.
        """
        from ebbtide.analysis.metrics.link import link_use

        return link_use(self.trace, ranks)

    def gpu(self, ranks: Sequence[int] | None = None) -> GpuState:
        """Utilization, power, clocks and temperature of the GPUs, per phase.

        Args:
            ranks: Ranks to look at; None: all.

        Raises:
            TraceError: A rank is not in the trace.
        """
        from ebbtide.analysis.metrics.gpu_state import gpu_state

        return gpu_state(self.trace, ranks)

    def activity(self, rank: int | None = None) -> GpuActivity:
        """Compute, communication, copies and idle time of the first GPU of a rank.

        Args:
            rank: The rank; None: the first one.

        Raises:
            TraceError: The rank is not in the trace.
        """
        from ebbtide.analysis.metrics.activity.activity import gpu_activity

        return gpu_activity(self.trace, rank)

    def holders(self, rank: int | None = None, at_ns: int | None = None, device: str | None = None) -> Holders | None:
        """Holders of the memory of a device at a time: by category, module and call site; None if it was not recorded.

        Args:
            rank: The rank; None: the first one.
            at_ns: The time, ns; None: that of the largest use.
            device: The device; None: the rank's first one.

        Raises:
            TraceError: The rank is not in the trace.
        """
        from ebbtide.analysis.metrics.holders.holders import holders_at

        return holders_at(self.trace, self.trace.ranks[0] if rank is None else rank, at_ns, device)

    def findings(self) -> Findings:
        """Causes that hold the job back, with evidence and potential gain, the largest gain first."""
        from ebbtide.analysis.findings import find

        return find(self.trace)

    def iterations(self, ranks: Sequence[int] | None = None) -> Iterations:
        """Milliseconds of every iteration and phase, and how they spread over iterations and ranks.

        Args:
            ranks: Ranks to look at; None: all.

        Raises:
            TraceError: A rank is not in the trace.
        """
        from ebbtide.analysis.metrics.iteration_stats import compare_iterations

        return compare_iterations(self.trace, ranks)

    def ranks(self) -> RankTable:
        """Medians of each rank, and the ranks that differ from the others with their causes."""
        from ebbtide.analysis.metrics.ranks.by_rank import rank_table

        return rank_table(self.trace)

    def substeps(self, ranks: Sequence[int] | None = None) -> SubSteps:
        """Sub-steps of the update of a DeepSpeed job or of a simulated schedule; none where they were not recorded.

        Args:
            ranks: Ranks to look at; None: all.

        Raises:
            TraceError: A rank is not in the trace.
        """
        from ebbtide.analysis.metrics.substeps.breakdown import sub_steps

        return sub_steps(self.trace, ranks)
