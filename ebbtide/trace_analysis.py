"""The public facade for analysing a trace in Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from ebbtide import seams
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.errors import UserError
from ebbtide.profiler.trace import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from ebbtide.analysis.findings import Findings
    from ebbtide.analysis.metrics.advice import Adviser
    from ebbtide.interleave.policies import Policy
    from ebbtide.interleave.replay.replay import Replay
    from ebbtide.machines.catalog import MachineArgument
    from ebbtide.units import ByteCount


class TraceAnalysis(JobMetrics):
    """The figures of one trace, and what they show, as the commands of the same names
    print them.

    Medians are over the steady iterations: the first two are left out where there are
    five or more. What was not recorded is None. Every result is a frozen dataclass with
    `as_json()`, the object that the command prints with `--json`, and `to_pandas()`,
    its main table, which notebooks show.

    Example:
        >>> analysis = TraceAnalysis("run.ebb")
        >>> analysis.windows(min_bytes=4 * 2**30, ranks=[0]).to_pandas()
    """

    def __init__(
        self, trace: Trace | str | Path, adviser: Adviser | None = None
    ) -> None:
        """Take a trace, or open one by its path. Nothing is computed yet.

        Args:
            trace: A trace, from `ebbtide.open_trace` or from an importer, or the path
                of one.
            adviser: Recommends settings by simulation to rules that advise some; None:
                they estimate them.

        Raises:
            TraceError: The path is not a trace, or is damaged.
        """
        if isinstance(trace, str | Path):
            trace = open_trace(trace)
        if not isinstance(trace, Trace):
            raise UserError(
                f"{trace!r:.80} is no trace: give its path, or what ebbtide.open_trace "
                "returns"
            )
        super().__init__(trace, adviser)

    def findings(self) -> Findings:
        """Causes that hold the job back, the largest gain first, with evidence and
        potential gain.

        Settings that they advise are simulated, as `ebbtide replay --recommend`
        does.
        """
        from ebbtide.analysis.findings import find

        return find(self.trace, self.adviser or self._own_adviser())

    def _own_adviser(self) -> Adviser | None:
        """Return what simulates advice, None where the feature for it is not there."""
        make_adviser = seams.find_service("adviser")
        return (
            None if make_adviser is None else cast("Adviser", make_adviser(self.trace))
        )

    def replay(
        self,
        policies: Sequence[Policy | str] | Policy | str | None = None,
        machine: MachineArgument | None = None,
        free_bytes: ByteCount | None = None,
        host_free_bytes: ByteCount | None = None,
    ) -> Replay:
        """Iteration times under other offload policies, as `ebbtide replay` predicts
        them.

        Args:
            policies: Policies, or one, as text such as `adaptive`; None: all that are
                built in.
            machine: File, preset or machine; None: the recorded machine, else the
                preset of the trace's card.
            free_bytes: Device memory that is always free, bytes, or text such as
                `4GiB`; None: as recorded.
            host_free_bytes: Host memory for state and gradients, as `free_bytes`; None:
                the machine's.

        Raises:
            UserError: The trace lacks what a replay needs, or there is no such policy
                or machine.
        """
        from ebbtide.interleave.replay.replay_trace import replay_trace

        return replay_trace(self.trace, machine, policies, free_bytes, host_free_bytes)

    def plot(
        self,
        kind: str = "both",
        rank: int | None = None,
        iterations: tuple[int, int] | None = None,
    ) -> Figure:
        """Draw the trace over time, as `ebbtide plot` does.

        Args:
            kind: What to draw: `both` (memory and link), `memory`, `link`, `activity`,
                `all`, `windows` or `ranks`.
            rank: The rank to draw; None: the first one.
            iterations: Iterations [first, end) to draw; None: all.

        Raises:
            TraceError: The trace has no such rank, or no data of that kind.
            UserError: There is no such kind.
        """
        from ebbtide.analysis.plot import draw

        return draw([self.trace], rank=rank, kind=kind, span=iterations or (0, None))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]
