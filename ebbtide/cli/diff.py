"""`ebbtide diff`: compare two traces."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.cli.options import Json

if TYPE_CHECKING:
    from ebbtide.analysis.diff import Change, Diff, TimeChange

# The pools that the largest change may be of: what a job asks of its device.
_DEVICE_POOLS = ("device", "allocated", "heap")
# Sizes of one job differ by less than this from run to run.
_LEAST_SHARE = 0.01

Text = Callable[[float | None], str]


def diff(
    a: Annotated[Path, typer.Argument(metavar="A.ebb", help="First trace.")],
    b: Annotated[Path, typer.Argument(metavar="B.ebb", help="Second trace.")],
    as_json: Json = False,
) -> None:
    """Compare time, memory, link use and setup of two traces."""
    from ebbtide.analysis.diff import compare
    from ebbtide.profiler.trace import open_trace

    found = compare(open_trace(a), open_trace(b))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        _print(found)


def _print(diff: Diff) -> None:

    from ebbtide.cli.render.tables import table
    from ebbtide.units import bytes_text, ms_text

    typer.echo(f"A: {diff.a}, {diff.counted[0]} counted iterations")
    typer.echo(f"B: {diff.b}, {diff.counted[1]} counted iterations")
    typer.echo(headline(diff))
    times = [[*_row(change.of, change, ms_text), _verdict(change)] for change in diff.median_ms]
    table("Median times", ["phase", "A", "B", "B - A", "B / A", "verdict"], times)
    sizes = [
        *((f"peak {change.of}", change) for change in diff.peak_bytes),
        *((f"free at peak, {change.of}", change) for change in diff.min_free_bytes),
        *((f"h2d, {change.of}", change) for change in diff.h2d_bytes),
        *((f"d2h, {change.of}", change) for change in diff.d2h_bytes),
    ]
    known = [_row(name, change, bytes_text) for name, change in sizes if (change.a, change.b) != (None, None)]
    if known:
        table("Memory, and bytes per iteration", ["what", "A", "B", "B - A", "B / A"], known)
    if diff.facts:
        facts = [[_fact(value) for value in (fact.what, fact.a, fact.b)] for fact in diff.facts]
        table("Not the same", ["what", "A", "B"], facts)


def headline(diff: Diff) -> str:
    """The largest change in one sentence: of the times that differ beyond their spread; where none does, of the sizes,
    as a share of the peak or of all that is moved in that direction."""
    from ebbtide.units import bytes_text, ms_text

    iteration, *phases = diff.median_ms
    times = [time for time in (*phases, iteration) if time.beyond_spread]
    if times:
        time = max(times, key=lambda time: abs(time.difference or 0))
        return _sentence("an iteration takes" if time is iteration else f"{time.of} takes", time, ms_text)
    sizes = [(_share(c, [c]), f"the peak of {c.of} memory is", c) for c in diff.peak_bytes if c.of in _DEVICE_POOLS]
    for way, moved in (("h2d", diff.h2d_bytes), ("d2h", diff.d2h_bytes)):
        sizes += [(_share(change, moved), f"{change.of} moves {way}", change) for change in moved]
    share, subject, size = max(sizes, key=lambda size: size[0])
    if share >= _LEAST_SHARE:
        return _sentence(subject, size, bytes_text)
    if all(time.beyond_spread is None for time in diff.median_ms):
        return "Whether times differ cannot be told: that takes three counted iterations in each run."
    return "No time differs by more than the spread of the iterations explains."


def _share(change: Change, parts: list[Change]) -> float:
    """How much a change is of the whole, in the run where that is larger."""
    whole = max(sum(part.a or 0 for part in parts), sum(part.b or 0 for part in parts))
    return abs(change.difference or 0) / (whole or 1)


def _sentence(subject: str, change: Change, text: Text) -> str:
    times = "" if change.ratio is None else f", {change.ratio:.2f} times as much"
    return f"Largest change: {subject} {text(change.b)} in B and {text(change.a)} in A{times}."


def _row(name: str, change: Change, text: Text) -> list[str]:
    sign = "+" if change.difference is not None and change.difference > 0 else ""
    ratio = "-" if change.ratio is None else f"{change.ratio:.2f}"
    return [name, text(change.a), text(change.b), sign + text(change.difference), ratio]


def _verdict(change: TimeChange) -> str:
    if change.beyond_spread is None:
        return "cannot tell"
    return "beyond the spread" if change.beyond_spread else "within the spread"


def _fact(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
