"""The totals of a box: rates that its ranks share."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ebbtide.json_files import number_range

MAX_RANKS = 1024
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS, description=f"a whole number from 1 to {MAX_RANKS}")]
TotalRate = Annotated[float, number_range(1e6, 1e15)]


@dataclass(frozen=True)
class Box:
    """Rates of a host with all its ranks busy; None is not known."""

    ranks: Ranks  # Ranks that were busy.
    cpu_update_params_per_s: TotalRate | None = None  # Parameters that all of them together update on the CPU.
    host_memory_bytes_per_s: TotalRate | None = None  # Traffic of all of them together with host memory.
    one_rank_cpu_update_params_per_s: TotalRate | None = None  # The rate of one rank while the others are idle.
    one_rank_host_memory_bytes_per_s: TotalRate | None = None  # The same of host memory.


def rate_of_rank(rate: float | None, total: float | None, ranks: int) -> float | None:
    """Return the rate of one of several ranks: its own, or its part of the total where that is known and smaller."""
    return rate if rate is None or total is None else min(rate, total / ranks)
