"""Chooses the ranks to print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo

if TYPE_CHECKING:
    from ebbtide.profiler.trace import Trace


def choose_ranks(trace: Trace, rank: int | None, as_json: bool) -> list[int]:
    """Return the ranks to print: `rank` if given, else the first one, or all of them as JSON.

    Prints a hint if other ranks are left out.

    Raises:
        TraceError: The trace does not have the rank.
    """
    if rank is not None:
        trace.rank(rank)
        return [rank]
    if not as_json and len(trace.ranks) > 1:
        echo(f"rank {trace.ranks[0]} of {len(trace.ranks)} ranks (--rank N for another one, --json for all)")
    return trace.ranks if as_json else trace.ranks[:1]
