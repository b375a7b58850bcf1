"""The tables of memory: pools per phase, holders at a time, and an out-of-memory
error."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter

from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    free_memory_text,
    free_pool,
    peak_pool,
)
from ebbtide.analysis.metrics.holders.holders import Holder, Holders
from ebbtide.analysis.metrics.memory import GAPS, MemoryUse
from ebbtide.analysis.metrics.missing import NO_MEMORY, no_iterations, on_demand_remarks
from ebbtide.analysis.metrics.out_of_memory import OutOfMemory
from ebbtide.analysis.tables.table import (
    Column,
    Gain,
    Table,
    View,
    always_free,
    share,
    size,
    text,
)
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import AllocatorState
from ebbtide.units import NOT_KNOWN, bytes_text, ms_text

_SOURCE = "ebbtide memory --json"
_MAX_SITE_CHARS = 60
# Rows of each table of holders, and on a screen the rows of categories, modules and
# call sites.
_MAX_HOLDERS, _ON_SCREEN = 15, (5, 3, 3)
_NOT_NAMED = (
    "what holds it was not recorded; `ebbtide profile --allocator-iterations 3` "
    "records it"
)
_MOST_UNNAMED = 0.1
_WHOLE = "whole trace"
_LEAST_FREE = "least free"


def memory_view(trace: Trace, memory: MemoryUse, verbose: bool = True) -> View:
    """Return the highest use of each pool per phase, and the differences between pools.

    With `verbose`, it has also the lowest use.
    """
    if not memory.pools:
        yield f"{trace.path}: {NO_MEMORY}"
        return
    yield from _peak_line(trace, memory)
    if memory.pools[0].phase is None:
        yield f"figures of the whole trace: {no_iterations(trace)}"
    yield from on_demand_remarks(trace)
    if verbose:
        yield Table(
            "pools",
            "Memory",
            _range_columns("pool", "pool"),
            memory.pools,
            None,
            _SOURCE,
        )
        title = "Differences between pools"
        yield Table(
            "gaps",
            title,
            _range_columns("difference", "gap"),
            memory.gaps,
            None,
            _SOURCE,
        )
    else:
        yield _highest_table(trace, memory)
    for rank, state in memory.allocators:
        yield allocator_table(rank, state)
    if not verbose:
        yield "lowest and highest use of each: -v"


def _peak_line(trace: Trace, memory: MemoryUse) -> Iterator[str]:
    """Yield the largest use of the device by the job, and the least free memory."""
    used = [
        use
        for use in memory.pools
        if use.pool == (free_pool(trace) or peak_pool(trace))
    ]
    if not used:
        return
    most = max(used, key=lambda use: use.peak_bytes)
    capacity = capacity_bytes(trace, most.rank)
    of_capacity = f" of {bytes_text(capacity)}" if capacity is not None else ""
    free = [gap.low_bytes for gap in memory.gaps if gap.gap == "free"]
    of_rank = f", rank {most.rank}" if len(trace.ranks) > 1 else ""
    left = f"; {bytes_text(min(free))} free.{always_free(trace)}" if free else ""
    if capacity is not None and most.peak_bytes > capacity:
        left = f"; {bytes_text(most.peak_bytes - capacity)} are missing"
    phase = f" in {most.phase}, median of the iterations" if most.phase else ""
    yield (
        f"{trace.path}: {bytes_text(most.peak_bytes)}{of_capacity} at the peak{phase} "
        f"({most.pool}{of_rank}){left}"
    )


def _highest_table(trace: Trace, memory: MemoryUse) -> Table:
    """Return a row per pool and difference with the highest use (of free memory the
    lowest) in a column per phase."""
    rows: dict[tuple[int, str], dict[str | None, int]] = {}
    for use in memory.pools:
        rows.setdefault((use.rank, use.pool), {})[use.phase] = use.peak_bytes
    for gap in memory.gaps:
        size_bytes = gap.low_bytes if gap.gap == "free" else gap.peak_bytes
        name = _LEAST_FREE if gap.gap == "free" else gap.gap
        rows.setdefault((gap.rank, name), {})[gap.phase] = size_bytes
    phases = list(dict.fromkeys(use.phase for use in memory.pools))
    columns = [
        size(phase or _WHOLE, lambda row, phase=phase: row[1].get(phase))
        for phase in phases
    ]
    names = {name for _, name in rows}
    meanings = [
        f"{gap}: {upper} minus {lower}"
        for gap, (upper, lower) in GAPS.items()
        if gap in names
    ]
    note = "; ".join(
        [
            *meanings,
            *([f"free: {free_memory_text(trace)}"] if _LEAST_FREE in names else []),
        ]
    )
    title = (
        "Highest use, medians over the iterations"
        if phases[0] is not None
        else "Highest use"
    )
    return Table(
        "use",
        title,
        (text("pool", lambda row: row[0][1]), *columns),
        list(rows.items()),
        note or None,
    )


def _range_columns(label: str, name: str) -> tuple[Column, ...]:
    phase = text("phase", lambda use: use.phase or _WHOLE)
    return (
        text(label, name),
        phase,
        size("lowest", "low_bytes"),
        size("highest", "peak_bytes"),
    )


def allocator_table(rank: int, state: AllocatorState) -> Table:
    """Return the table of the allocator's segments at the end of a memory snapshot.

    The allocator is torch's.
    """
    rows = [
        ("reserved", state.reserved_bytes, f"{state.segments:,} segments"),
        (
            "of these in private pools",
            state.private_bytes,
            f"{state.private_segments:,} segments",
        ),
        ("allocated", state.allocated_bytes, "blocks in use"),
        ("requested", state.requested_bytes, "what tensors asked for"),
        ("inactive", state.inactive_bytes, "free, in segments with blocks in use"),
        ("largest free block", state.largest_free_bytes, None),
    ]
    columns = (
        text("bytes of", itemgetter(0)),
        size("size", itemgetter(1)),
        text("in", itemgetter(2)),
    )
    return Table(
        "allocators",
        f"Allocator at the end, rank {rank}, {state.device}",
        columns,
        rows,
    )


def holders_view(
    trace: Trace, holders: Holders | None, at: str, verbose: bool = True
) -> View:
    """Return the holders of memory by category, by module and by call site.

    Without `verbose`, they are the largest ones; `holders` is None where no memory was
    recorded, `at` is the option `--at`.
    """
    if holders is None:
        yield f"{trace.path}: {'; '.join(on_demand_remarks(trace)) or NO_MEMORY}"
        return
    yield f"{trace.path}: {holders_text(holders, at == 'peak')}"
    yield from _holder_parts(holders, verbose)


def holders_text(holders: Holders, is_peak: bool = True) -> str:
    """Return the bytes that are divided, and their time."""
    moment = (
        f"at its peak, {ms_text(holders.t_ms)}"
        if is_peak
        else f"at {ms_text(holders.t_ms)}"
    )
    return (
        f"{bytes_text(holders.bytes)} of {holders.device} {moment} after the start "
        f"(pool `{holders.pool}`)"
    )


def holder_tables(holders: Holders) -> list[Table]:
    """Return the bytes by category, by module and by call site.

    Tables of what is not known have no rows.
    """
    return [
        _holder_table("holders", "category", holders, _category),
        _holder_table("modules", "module", holders, _module),
        _holder_table(
            "sites",
            "call site",
            holders,
            lambda one: f"{_category(one)} by {_short(one.site)}" if one.site else None,
        ),
    ]


def _holder_parts(holders: Holders, verbose: bool) -> View:
    """Return the tables of holders, without `verbose` the first rows of each."""
    tables = holder_tables(holders)
    unnamed = sum(holder.bytes for holder in holders.holders if holder.category is None)
    if unnamed > _MOST_UNNAMED * holders.bytes and any(tables[1:]):
        yield f"{bytes_text(unnamed)} not known: {_NOT_NAMED}"
    if not any(tables[1:]) and all(
        holder.category is None for holder in holders.holders
    ):
        yield _NOT_NAMED
        return
    if verbose:
        yield from tables
        return
    shown = [
        replace(table, all_rows=table.all_rows[:rows])
        for table, rows in zip(tables, _ON_SCREEN, strict=True)
    ]
    yield from shown
    if any(
        len(short.all_rows) < len(table.all_rows)
        for short, table in zip(shown, tables, strict=True)
    ):
        yield "more modules and call sites: -v"


def _holder_table(
    name: str, label: str, holders: Holders, name_of: Callable[[Holder], str | None]
) -> Table:
    """Return the bytes by a name of each holder, without those that have none."""
    sums: dict[str, int] = {}
    for holder in holders.holders:
        if (named := name_of(holder)) is not None:
            sums[named] = sums.get(named, 0) + holder.bytes
    rows = sorted(sums.items(), key=lambda item: -item[1])
    shares = share(
        "share", lambda row: row[1] / holders.bytes if holders.bytes else None, digits=1
    )
    columns = text(label, itemgetter(0)), size("bytes", itemgetter(1)), shares
    return Table(
        name,
        f"Holders by {label}",
        columns,
        rows,
        None,
        "ebbtide memory --at peak --json",
        _MAX_HOLDERS,
    )


def out_of_memory_view(
    trace: Trace, error: OutOfMemory | None, verbose: bool = True
) -> View:
    """Return when memory ran out, the figures at that time, the holders, and what would
    have freed memory.

    Without `verbose`, holders are the largest ones; `error` is None where none was
    recorded."""
    if error is None:
        yield f"{trace.path}: no out-of-memory error was recorded"
        return
    record = error.record
    moment = (
        f"after {ms_text(error.memory.t_ms)}, in "
        f"{record.phase or 'a phase that is not known'}"
    )
    if record.iteration is not None:
        moment += f" of iteration {record.iteration}"
    yield (
        f"{trace.path}: rank {error.rank} ran out of memory on "
        f"{record.device or 'its device'} {moment}"
    )
    figures = [
        ("requested", record.requested_bytes),
        ("free", record.free_bytes),
        ("reserved by torch", record.reserved_bytes),
        ("allocated", record.allocated_bytes),
        ("capacity", record.capacity_bytes),
    ]
    yield ", ".join(
        f"{name} {bytes_text(amount)}" for name, amount in figures if amount is not None
    )
    if error.errors > 1:
        yield f"{error.errors} errors were recorded; this is the last one"
    if not error.remedies:
        yield "no remedy can be computed: too few figures were recorded"
    for remedy in error.remedies:
        line = f"- {remedy.text}"
        yield Gain(line) if remedy.enough else line
    if error.holders_t_ms is not None:
        yield f"the holders are those of {ms_text(error.holders_t_ms)}"
    yield from _holder_parts(error.memory, verbose)


def _category(holder: Holder) -> str:
    return holder.category or NOT_KNOWN


def _module(holder: Holder) -> str | None:
    """Return category and module, with the layers of a list as one.

    An example is `parameter of blocks.*.up`.
    """
    if holder.module is None:
        return None
    module = ".".join(
        "*" if part.isdigit() else part for part in holder.module.split(".")
    )
    return f"{_category(holder)} of {module}"


def _short(site: str) -> str:
    """Return a call site with the end of its path: `forward (.../model.py:20)`."""
    if len(site) <= _MAX_SITE_CHARS:
        return site
    function, parenthesis, path = site.rpartition(" (")
    return f"{function}{parenthesis}.../{path.rsplit('/', 1)[-1]}"[:_MAX_SITE_CHARS]
