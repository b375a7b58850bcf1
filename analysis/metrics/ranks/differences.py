"""Describes ranks, or whole hosts, that differ from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ebbtide.analysis.dataframes import to_frame
from ebbtide.analysis.metrics.ranks.quantities import QUANTITIES
from ebbtide.phases import PHASES


@dataclass(frozen=True)
class Deviation:
    """A quantity in which a rank differs.

    Attributes:
        quantity: `forward_ms` and so on, `phases_ms` (their sum), `iteration_ms`; `forward_late_ms` and so on, by which
            a phase begins later than on the median rank of the host; `h2d_bytes_per_s` and `d2h_bytes_per_s`, the rate
            of copies while they run, or the highest sampled rate of an iteration; `free_bytes`, the least of an
            iteration; `sm_clock_mhz`, of the busy GPU.
        value: Median over the steady iterations; of a host, of its ranks.
        usual: The same of the median rank, of two ranks of the better one; 0 of a lateness.
    """

    quantity: str
    value: float
    usual: float

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
    """A rank that differs from the others, or a host whose ranks do so together.

    Attributes:
        ranks: The rank, or all ranks of the host.
        host: Their host; None where not recorded.
        is_host: Whether the host differs as a whole.
        cause: What explains the difference: `slow link`, `slow clock`, `slow forward` and so on, `late forward` and so
            on, `slow phases`, `slow iteration` or `less free memory`.
        deviations: The quantities, the cause first.
        facts: What is recorded of the rank's process and device and unlike most ranks.
    """

    ranks: tuple[int, ...]
    host: str | None
    is_host: bool
    cause: str
    deviations: tuple[Deviation, ...]
    facts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The rank or the host, for people."""
        return f"host {self.host}" if self.is_host else f"rank {self.ranks[0]}"

    @property
    def extra_ms(self) -> float:
        """Milliseconds by which its phases take longer."""
        longer = {d.quantity: d.value - d.usual for d in self.deviations}
        return longer.get("phases_ms", sum(longer.get(f"{phase}_ms", 0.0) for phase in PHASES))


@dataclass(frozen=True)
class RankDifferences:
    """The ranks of a trace that differ from the others.

    Attributes:
        compared: Number of ranks that were compared; 0 where the trace has one rank, or fewer than 5 steady iterations.
        hosts: Number of hosts that are recorded.
        differences: Hosts, then ranks, those whose phases take longest first.
    """

    compared: int
    hosts: int
    differences: tuple[RankDifference, ...]

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
