"""Defines the quantities that ranks are compared by, which side of each is worse, and which difference matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.phases import PHASES
from ebbtide.units import bytes_text, ms_text, rate_text

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
    """A quantity that ranks are compared by.

    Attributes:
        name: Its name in JSON.
        label: Its name for people.
        cause: The cause of a difference, as in `slow link`.
        higher_is_worse: Whether more of it is worse.
        text: A function from a value to text with its unit.
        within_host: Whether only ranks of one host are compared, which share a clock.
    """

    name: str
    label: str
    cause: str
    higher_is_worse: bool
    text: Callable[[float], str]
    within_host: bool = False

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
