"""Prints what holds the memory of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import print_table
from ebbtide.units import bytes_text, ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.holders.holders import Holder, Holders
    from ebbtide.profiler.trace import Trace

_NOT_KNOWN = "not known"
_MAX_SITE_CHARS = 60
_MAX_ROWS = 15


def print_holders(trace: Trace, result: Holders | None, at: str) -> None:
    """Print the holders of memory by category, by module and by call site.

    Args:
        trace: The trace.
        result: What holds the memory; None where no memory was recorded.
        at: The option `--at`.
    """
    from ebbtide.analysis.metrics.missing import NO_MEMORY, on_demand_remarks

    if result is None:
        echo(f"{trace.path}: {'; '.join(on_demand_remarks(trace)) or NO_MEMORY}")
        return
    moment = f"at its peak, {ms_text(result.t_ms)}" if at == "peak" else f"at {ms_text(result.t_ms)}"
    echo(f"{trace.path}: {bytes_text(result.bytes)} of {result.device} {moment} after the start (pool {result.pool})")
    print_holder_tables(result)


def print_holder_tables(result: Holders) -> None:
    """Print the holders by category, and each of them."""

    def share(size: int) -> str:
        return f"{size / result.bytes:.1%}" if result.bytes else "-"

    def rows(sums: dict[str, int]) -> list[list[str]]:
        ordered = sorted(sums.items(), key=lambda item: -item[1])
        return [[name, bytes_text(size), share(size)] for name, size in ordered]

    print_table("Holders by category", ["category", "bytes", "share"], rows(_sums(result, _category)))
    for title, column, name_of in (
        ("Holders by module", "module", _module),
        ("Holders by call site", "call site", _site),
    ):
        table = rows(_sums(result, name_of))
        if table:
            print_table(title, [column, "bytes", "share"], table[:_MAX_ROWS])
            if len(table) > _MAX_ROWS:
                echo(f"{len(table) - _MAX_ROWS} more with --json")


def _sums(result: Holders, name_of: Callable[[Holder], str | None]) -> dict[str, int]:
    """Return the bytes by a name of each holder, without those that have none."""
    sums: dict[str, int] = {}
    for holder in result.holders:
        name = name_of(holder)
        if name is not None:
            sums[name] = sums.get(name, 0) + holder.bytes
    return sums


def _category(holder: Holder) -> str:
    return holder.category or _NOT_KNOWN


def _module(holder: Holder) -> str | None:
    """Return category and module, the layers of a list as one: `parameter of blocks.*.up`."""
    if holder.module is None:
        return None
    module = ".".join("*" if part.isdigit() else part for part in holder.module.split("."))
    return f"{_category(holder)} of {module}"


def _site(holder: Holder) -> str | None:
    return f"{_category(holder)} by {_short(holder.site)}" if holder.site else None


def _short(site: str) -> str:
    """Return a call site with the end of its path: `forward (.../model.py:20)`."""
    if len(site) <= _MAX_SITE_CHARS:
        return site
    function, parenthesis, path = site.rpartition(" (")
    return f"{function}{parenthesis}.../{path.rsplit('/', 1)[-1]}"[:_MAX_SITE_CHARS]
