"""`ebbtide memory`: memory pools per phase, or what holds the memory at a time."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide import seams
from ebbtide.cli.command import command
from ebbtide.cli.options import Json, Rank, TraceFile, Verbose, valued
from ebbtide.cli.printing import print_view
from ebbtide.cli.reading import (
    choose_ranks,
    print_json,
    print_next,
    print_prediction,
    print_rank,
    show_result,
)

if TYPE_CHECKING:
    from ebbtide.profiler.trace import Trace

_UNITS_MS = {"": 1.0, "ms": 1.0, "s": 1000.0}


@command("Explain", 1, examples=("memory run.ebb", "memory run.ebb --at peak"))
def memory(
    trace: TraceFile,
    rank: Rank = None,
    at: Annotated[
        str | None,
        valued(
            "peak|oom|TIME",
            "Print what holds the memory at the peak, when it ran out, or at a time "
            "from the trace's start, e.g. "
            "350ms or 12.5s.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        valued("DEVICE", "Device (only with --at), e.g. cuda:1.", "the rank's first"),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print every memory pool per phase, and the differences: fragmentation, memory
    outside torch, free memory.

    With --at, print what holds the memory at one time instead."""
    if at is None and device is not None:
        raise typer.BadParameter("--device needs --at")
    time_ms = None if at in (None, "peak", "oom") else _milliseconds(at)

    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.analysis.metrics.memory_spans import trace_start_ns
    from ebbtide.analysis.tables.memory import holders_view, memory_view
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    metrics, shown = (
        JobMetrics(opened),
        choose_ranks(opened, rank, as_json and at is None),
    )
    of_rank = next(iter(shown), None) if rank is None else None
    if at is None:
        view = partial(memory_view, verbose=verbose or as_json)
        named = any(
            opened.rank(n).inventories or opened.labels(n, "allocations", "device")
            for n in shown
        )
        follow_up = "memory {} --at peak" if named else "findings {}"
        show_result(opened, metrics.memory(shown), view, as_json, follow_up, of_rank)
        return
    if at == "oom":
        _print_out_of_memory(
            opened, shown if rank is not None else opened.ranks, verbose, as_json
        )
        return
    start_ns = trace_start_ns(opened)
    at_ns = (
        None if start_ns is None or time_ms is None else round(start_ns + time_ms * 1e6)
    )
    result = metrics.holders(shown[0], at_ns, device)
    if as_json:
        nothing: dict[str, Any] = {
            "pool": None,
            "device": device,
            "t_ms": time_ms,
            "bytes": None,
            "holders": [],
        }
        print_json(
            opened, {"rank": shown[0], **(result.as_json() if result else nothing)}
        )
    else:
        print_prediction(opened)
        print_view(holders_view(opened, result, at, verbose))
        print_rank(opened, of_rank)
        print_next(opened, "findings {}")


def _milliseconds(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(ms|s|)\s*", text)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a time: write peak, oom, or a time like 350ms or 12.5s"
        )
    return float(match[1]) * _UNITS_MS[match[2]]


def _print_out_of_memory(
    trace: Trace, ranks: list[int], verbose: bool, as_json: bool
) -> None:
    """Print the error of the first of some ranks that has one."""
    from ebbtide.analysis.metrics.out_of_memory import out_of_memory
    from ebbtide.analysis.tables.memory import out_of_memory_view

    error = next(
        (error for rank in ranks if (error := out_of_memory(trace, rank)) is not None),
        None,
    )
    replay_offload = seams.find_service("replayed-offload")
    if error is not None and replay_offload is not None:
        error = replay_offload(trace, error)
    if as_json:
        nothing: dict[str, Any] = {
            "rank": ranks[0],
            "pool": None,
            "t_ms": None,
            "bytes": None,
            "holders": [],
        }
        print_json(trace, error.as_json() if error is not None else nothing)
    else:
        print_prediction(trace)
        print_view(out_of_memory_view(trace, error, verbose))
        print_next(trace, "findings {}")
