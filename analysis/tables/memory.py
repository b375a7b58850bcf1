"""The tables of memory: pools per phase, what holds it at a time, and an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

from ebbtide.analysis.metrics.holders.holders import Holder, Holders
from ebbtide.analysis.metrics.memory import MemoryUse
from ebbtide.analysis.metrics.missing import NO_MEMORY, no_iterations, on_demand_remarks
from ebbtide.analysis.metrics.out_of_memory import OutOfMemory
from ebbtide.analysis.tables.table import Column, Table, View, share, size, text
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import AllocatorState
from ebbtide.units import bytes_text, ms_text

_SOURCE = "ebbtide memory --json"
_UNNAMED = "not known"
_MAX_SITE_CHARS = 60
_MAX_HOLDERS = 15


def memory_view(trace: Trace, memory: MemoryUse) -> View:
    """Return the lowest and highest use of each memory pool per phase, and the differences between pools."""
    if not memory.pools:
        yield f"{trace.path}: {NO_MEMORY}"
        return
    if memory.pools[0].phase is None:
        yield f"{trace.path}: lowest and highest use over the whole trace ({no_iterations(trace)})"
    else:
        yield f"{trace.path}: lowest and highest use per phase, medians over the iterations"
    yield from on_demand_remarks(trace)
    yield Table("pools", "Memory", _range_columns("pool", "pool"), memory.pools, None, _SOURCE)
    yield Table("gaps", "Differences between pools", _range_columns("difference", "gap"), memory.gaps, None, _SOURCE)
    for rank, state in memory.allocators:
        yield allocator_table(rank, state)


def _range_columns(label: str, name: str) -> tuple[Column, ...]:
    phase = text("phase", lambda use: use.phase or "whole trace")
    return text(label, name), phase, size("lowest", "low_bytes"), size("highest", "peak_bytes")


def allocator_table(rank: int, state: AllocatorState) -> Table:
    """Return the table of the segments of torch's allocator at the end of a memory snapshot."""
    rows = [
        ("reserved", state.reserved_bytes, f"{state.segments:,} segments"),
        ("of these in private pools", state.private_bytes, f"{state.private_segments:,} segments"),
        ("allocated", state.allocated_bytes, "blocks in use"),
        ("requested", state.requested_bytes, "what tensors asked for"),
        ("inactive", state.inactive_bytes, "free, in segments with blocks in use"),
        ("largest free block", state.largest_free_bytes, None),
    ]
    columns = text("bytes of", itemgetter(0)), size("size", itemgetter(1)), text("in", itemgetter(2))
    return Table("allocators", f"Allocator at the end, rank {rank}, {state.device}", columns, rows)


def holders_view(trace: Trace, holders: Holders | None, at: str) -> View:
    """Return the holders of memory by category, by module and by call site; `holders` is None where no memory was
    recorded, `at` the option `--at`."""
    if holders is None:
        yield f"{trace.path}: {'; '.join(on_demand_remarks(trace)) or NO_MEMORY}"
        return
    moment = f"at its peak, {ms_text(holders.t_ms)}" if at == "peak" else f"at {ms_text(holders.t_ms)}"
    yield f"{trace.path}: {bytes_text(holders.bytes)} of {holders.device} {moment} after the start"
    yield from holder_tables(holders)


def category_table(holders: Holders) -> Table:
    """Return the bytes of each category at a time."""
    note = (
        f"{bytes_text(holders.bytes)} of {holders.device} at {ms_text(holders.t_ms)} from the start (pool "
        f"`{holders.pool}`)."
    )
    return _holder_table("holders", "category", holders, _category, note)


def holder_tables(holders: Holders) -> list[Table]:
    """Return the bytes of each category, module and call site at a time."""
    return [
        category_table(holders),
        _holder_table("modules", "module", holders, _module),
        _holder_table("sites", "call site", holders, _site),
    ]


def _holder_table(
    name: str, label: str, holders: Holders, name_of: Callable[[Holder], str | None], note: str | None = None
) -> Table:
    """Return the bytes by a name of each holder, without those that have none."""
    sums: dict[str, int] = {}
    for holder in holders.holders:
        if (named := name_of(holder)) is not None:
            sums[named] = sums.get(named, 0) + holder.bytes
    rows = sorted(sums.items(), key=lambda item: -item[1])
    shares = share("share", lambda row: row[1] / holders.bytes if holders.bytes else None, digits=1)
    columns = text(label, itemgetter(0)), size("bytes", itemgetter(1)), shares
    return Table(name, f"Holders by {label}", columns, rows, note, "ebbtide memory --at peak --json", _MAX_HOLDERS)


def out_of_memory_view(trace: Trace, error: OutOfMemory | None) -> View:
    """Return when memory ran out, the figures at that time, the holders, and what would have freed memory; `error` is
    None where none was recorded."""
    if error is None:
        yield f"{trace.path}: no out-of-memory error was recorded"
        return
    record = error.record
    moment = f"after {ms_text(error.memory.t_ms)}, in {record.phase or 'a phase that is not known'}"
    if record.iteration is not None:
        moment += f" of iteration {record.iteration}"
    yield f"{trace.path}: rank {error.rank} ran out of memory on {record.device or 'its device'} {moment}"
    figures = [
        ("requested", record.requested_bytes),
        ("free", record.free_bytes),
        ("reserved by torch", record.reserved_bytes),
        ("allocated", record.allocated_bytes),
        ("capacity", record.capacity_bytes),
    ]
    yield ", ".join(f"{name} {bytes_text(amount)}" for name, amount in figures if amount is not None)
    if error.errors > 1:
        yield f"{error.errors} errors were recorded; this is the last one"
    if error.holders_t_ms is not None:
        yield f"the holders are those of {ms_text(error.holders_t_ms)}"
    yield from holder_tables(error.memory)
    yield ""
    if not error.remedies:
        yield "no remedy can be computed: too few figures were recorded"
    yield from (remedy.text for remedy in error.remedies)


def _category(holder: Holder) -> str:
    return holder.category or _UNNAMED


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
