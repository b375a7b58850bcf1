"""Prints an out-of-memory error of a recorded job in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.holders import print_holder_tables
from ebbtide.units import bytes_text, ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.out_of_memory import OutOfMemory
    from ebbtide.profiler.trace import Trace


def print_out_of_memory(trace: Trace, error: OutOfMemory | None) -> None:
    """Print when memory ran out, the figures at that time, the holders, and what would have freed memory.

    Args:
        trace: The trace.
        error: The error; None where none was recorded.
    """
    if error is None:
        echo(f"{trace.path}: no out-of-memory error was recorded")
        return
    record = error.record
    moment = f"after {ms_text(error.memory.t_ms)}, in {record.phase or 'a phase that is not known'}"
    if record.iteration is not None:
        moment += f" of iteration {record.iteration}"
    echo(f"{trace.path}: rank {error.rank} ran out of memory on {record.device or 'its device'} {moment}")
    figures = [
        ("requested", record.requested_bytes),
        ("free", record.free_bytes),
        ("reserved by torch", record.reserved_bytes),
        ("allocated", record.allocated_bytes),
        ("capacity", record.capacity_bytes),
    ]
    echo(", ".join(f"{name} {bytes_text(size)}" for name, size in figures if size is not None))
    if error.errors > 1:
        echo(f"{error.errors} errors were recorded; this is the last one")
    if error.holders_t_ms is not None:
        echo(f"the holders are those of {ms_text(error.holders_t_ms)}")
    print_holder_tables(error.memory)
    echo("")
    if not error.remedies:
        echo("no remedy can be computed: too few figures were recorded")
    for remedy in error.remedies:
        echo(remedy.text)
