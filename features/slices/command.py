"""Asks a running job for details of some of its iterations, and waits for them:
`ebbtide profile --attach`."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import typer

from ebbtide.cli.options import count
from ebbtide.cli.options import iterations as parse_iterations
from ebbtide.cli.printing import echo, progress_bar
from ebbtide.errors import TraceError
from ebbtide.features.slices.attach import AttachedSlice, attach
from ebbtide.terminal_lines import print_note

# Between looks at the progress of a slice.
_PERIOD_S = 0.1


def attach_to(
    path: Path,
    iterations: str | None,
    poll_ms: float,
    allocator_iterations: int,
    transfers: bool,
    wait: bool,
) -> None:
    """Ask a running job for a detailed slice of some iterations, a number or `FROM:TO`,
    and wait for its end."""
    first, number = _slice_range(iterations)
    attached = attach(path, number, first, poll_ms, allocator_iterations, transfers)
    if wait:
        _wait_for_slice(attached)
        _print_slice(attached)
    else:
        echo(
            "iterations "
            f"{_iterations_text(attached.request.first, attached.request.end)} will "
            "have details"
        )


def _slice_range(text: str | None) -> tuple[int | None, int]:
    """Parse `20` as (None, 20) and `500:520` as (500, 20)."""
    if text is None:
        raise typer.BadParameter(
            "--attach needs --steps, the number of iterations, or --iterations FROM:TO"
        )
    if ":" not in text:
        return None, count(text)
    first, end = parse_iterations(text)
    if end is None:
        raise typer.BadParameter(
            f"--iterations {text}: a slice needs an end, as in 500:520"
        )
    return first, end - first


def _wait_for_slice(attached: AttachedSlice) -> None:
    """Wait for the end of a slice, with a bar that shows how far it is."""
    first, end, ranks = (
        attached.request.first,
        attached.request.end,
        len(attached.processes),
    )
    on = f" on {ranks} ranks" if ranks > 1 else ""
    try:
        with progress_bar() as update:
            while not attached.update():
                reached = (
                    min(process.iteration or 0 for process in attached.processes) + 1
                )
                until = (
                    f"details begin at {first}"
                    if reached < first
                    else f"details until {end - 1}"
                )
                update(
                    f"iteration {reached}: {until}{on}",
                    min(max(reached, first), end) - first,
                    end - first,
                )
                time.sleep(_PERIOD_S)
    except KeyboardInterrupt:
        print_note(
            "no longer waiting; the job records iterations "
            f"{_iterations_text(first, end)} all the same"
        )
        raise


def _print_slice(attached: AttachedSlice) -> None:
    """Print the iterations that have details, and which ranks have others. Raise
    TraceError if none has any."""
    recorded = {process: attached.recorded(process) for process in attached.processes}
    spans = [span for span in recorded.values() if span is not None]
    if not spans:
        raise TraceError(
            "no details were recorded: the job ended, or was past iteration "
            f"{attached.request.end - 1}"
        )
    common = max(first for first, _ in spans), min(end for _, end in spans)
    if common[0] < common[1]:
        path = shlex.quote(str(attached.path))
        echo(
            f"details: iterations {_iterations_text(*common)}   in {path}: "
            f"--iterations {common[0]}:{common[1]}"
        )
    for process, span in recorded.items():
        if span is None:
            echo(
                f"rank {process.rank}: no details, since it was past the slice or has "
                "ended"
            )
        elif span != common:
            echo(f"rank {process.rank}: iterations {_iterations_text(*span)}")
    if common[1] < attached.request.end:
        echo(
            "the slice ended early: it was to last until iteration "
            f"{attached.request.end - 1}"
        )


def _iterations_text(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first} to {end - 1}"
