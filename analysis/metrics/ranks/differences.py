"""Describes ranks, or whole hosts, that differ from the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ebbtide.analysis.dataframes import TabularResult, to_frame
from ebbtide.phases import PHASES
from ebbtide.units import bytes_text, ms_text, rate_text

if TYPE_CHECKING:
    import pandas as pd

# Of an iteration and of the phase; bytes as a share of the capacity.
MIN_ITERATION_SHARE = 0.02
MIN_PHASE_SHARE = 0.02
MIN_LATE_MS = 1.0
MIN_RATE_SHARE = 0.1
MIN_CLOCK_SHARE = 0.05
MIN_CAPACITY_SHARE = 0.01
# A lower rate of a rank that also moves fewer bytes says nothing about its link.
MIN_BYTES_SHARE = 0.9


@dataclass(frozen=True)
class RankQuantity:
    """A quantity that ranks are compared by."""

    name: str  # Its name in JSON.
    label: str  # Its name for people.
    cause: str  # The cause of a difference, as in `slow link`.
    higher_is_worse: bool  # Whether more of it is worse.
    text: Callable[[float], str]  # A function from a value to text with its unit.
    within_host: bool = False  # Whether only ranks of one host are compared, which share a clock.

    @property
    def column(self) -> str:
        """The column of `rank_series`."""
        return self.name.replace("_late_ms", "_start_ms")

    @property
    def bytes_column(self) -> str | None:
        """The column of the bytes that a rate is of; None for other quantities."""
        return self.name.removesuffix("_per_s") if self.name.endswith("_bytes_per_s") else None


# In the order in which they explain a difference: a slow link makes phases slow, a slow phase makes the next one late.
# Time without a phase is none of them: it is long on ranks that wait for another one. What delays a rank outside its
# phases makes its next phase late.
QUANTITIES: tuple[RankQuantity, ...] = (
    RankQuantity("h2d_bytes_per_s", "h2d rate", "slow link", False, rate_text),
    RankQuantity("d2h_bytes_per_s", "d2h rate", "slow link", False, rate_text),
    RankQuantity("sm_clock_mhz", "SM clock", "slow clock", False, lambda megahertz: f"{megahertz:,.0f} MHz"),
    *(RankQuantity(f"{phase}_ms", phase, f"slow {phase}", True, ms_text) for phase in PHASES),
    RankQuantity("phases_ms", "all phases", "slow phases", True, ms_text),
    *(RankQuantity(f"{phase}_late_ms", f"start of {phase}", f"late {phase}", True, ms_text, True) for phase in PHASES),
    RankQuantity("iteration_ms", "iteration", "slow iteration", True, ms_text),
    RankQuantity("free_bytes", "least free memory", "less free memory", False, bytes_text),
)


@dataclass(frozen=True)
class Deviation:
    """A quantity in which a rank differs."""

    # `forward_ms` and so on, `phases_ms` (their sum), `iteration_ms`; `forward_late_ms` and so on, by which a phase
    # begins later than on the median rank of the host; `h2d_bytes_per_s` and `d2h_bytes_per_s`, the rate of copies
    # while they run, or the highest sampled rate of an iteration; `free_bytes`, the least of an iteration;
    # `sm_clock_mhz`, of the busy GPU.
    quantity: str
    value: float  # Median over the steady iterations; of a host, of its ranks.
    usual: float  # The same of the median rank, of two ranks of the better one; 0 of a lateness.

    @property
    def text(self) -> str:
        """The deviation in words."""
        kind = next(kind for kind in QUANTITIES if kind.name == self.quantity)
        if kind.within_host:
            return f"{kind.label} {kind.text(self.value)} later"
        share = f" ({100 * (self.value / self.usual - 1):+.0f} %)" if self.usual else ""
        return f"{kind.label} {kind.text(self.value)}, usual {kind.text(self.usual)}{share}"


@dataclass(frozen=True)
class RankDifference:
    """A rank that differs from the others, or a host whose ranks do so together."""

    ranks: tuple[int, ...]  # The rank, or all ranks of the host.
    host: str | None  # Their host; None where not recorded.
    is_host: bool  # Whether the host differs as a whole.
    # What explains the difference: `slow link`, `slow clock`, `slow forward` and so on, `late forward` and so on, `slow
    # phases`, `slow iteration` or `less free memory`.
    cause: str
    deviations: tuple[Deviation, ...]  # The quantities, the cause first.
    facts: tuple[str, ...]  # What is recorded of the rank's process and device and unlike most ranks.

    @property
    def name(self) -> str:
        """The rank or the host, for people."""
        return f"host {self.host}" if self.is_host else f"rank {self.ranks[0]}"

    @property
    def extra_ms(self) -> float:
        """Milliseconds by which its phases take longer."""
        longer = {d.quantity: d.value - d.usual for d in self.deviations}
        return longer.get("phases_ms", sum(longer.get(f"{phase}_ms", 0.0) for phase in PHASES))


@dataclass(frozen=True, repr=False)
class RankDifferences(TabularResult):
    """The ranks of a trace that differ from the others."""

    # Number of ranks that were compared; 0 where the trace has one rank, or fewer than 5 steady iterations.
    compared: int
    hosts: int  # Number of hosts that are recorded.
    differences: tuple[RankDifference, ...]  # Hosts, then ranks, those whose phases take longest first.

    @property
    def ranks(self) -> list[int]:
        """The ranks that differ, also with their host."""
        return sorted({rank for difference in self.differences for rank in difference.ranks})

    def as_json(self) -> list[dict[str, Any]] | None:
        """Return the value of `rank_differences` in JSON; None where ranks were not compared."""
        return [asdict(difference) for difference in self.differences] if self.compared else None

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per rank or host, with the fields of `RankDifference` as columns."""
        return to_frame(self.differences, RankDifference)


# Of a trace with one rank, or with fewer than 5 steady iterations.
NOT_COMPARED = RankDifferences(0, 0, ())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, as in `0, 4-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
