"""Prints the progress and the results of a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo, echo_error, echo_line, print_view, progress_bar

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.sweep.task import Row


@contextmanager
def sweep_progress(can_continue: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar for the block, and say on stderr when a sweep is resumed or stopped.

    Args:
        can_continue: Whether the same command continues a sweep that was stopped.
    """
    finished = total = 0
    started = False

    with progress_bar() as update:

        def progress(finished_rows: int, all_rows: int) -> None:
            nonlocal finished, total, started
            if not started and finished_rows:
                echo_error(f"resuming: {finished_rows} of {all_rows} combinations are already finished")
            finished, total, started = finished_rows, all_rows, True
            update(f"{finished} of {total} combinations", finished, total)

        try:
            yield progress
        except KeyboardInterrupt:
            remedy = "run the same command again to continue" if can_continue else "with -o they would be kept"
            echo_error(f"stopped: {finished} of {total} combinations are finished; {remedy}")
            raise


def print_sweep(rows: list[Row], notes: list[str], output: Path | None, as_json: bool, print_all: bool) -> None:
    """Print the tables of a sweep, or one JSON object that has the path of its table; that otherwise on stderr.

    Args:
        notes: What to know about the workloads.
    """
    from ebbtide.interleave.experiments.sweep.best import BASELINE, find_best, sweep_view

    best = find_best(rows)
    if as_json:
        summary = {
            "output": str(output) if output is not None else None,
            "rows": len(rows),
            "errors": sum(bool(row["error"]) for row in rows),
            "baseline": BASELINE,
            "best": [item.as_json() for item in best],
        }
        echo(json.dumps(summary))
        return
    print_view(sweep_view(rows, output, print_all))
    if notes:
        echo_line(f"note: {notes[0]}{f' (and {len(notes) - 1} more)' if len(notes) > 1 else ''}")
    options = [f"--all (all {len(rows):,} combinations)"] if len(rows) > len(best) and not print_all else []
    echo_line(f"next: {', '.join([*options, '--recommend for one of them (what to paste)'])}")
    if output is not None:
        echo_error(str(output))
