"""Prints the progress and the results of a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ebbtide.cli.printing import echo, print_view, progress_bar

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.sweep.task import Row


@contextmanager
def sweep_progress() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar for the block, and say on stderr when a sweep is resumed or stopped."""
    finished = total = 0
    started = False

    with progress_bar() as update:

        def progress(finished_rows: int, all_rows: int) -> None:
            nonlocal finished, total, started
            if not started and finished_rows:
                typer.echo(
                    f"ebbtide: resuming: {finished_rows} of {all_rows} combinations are already finished", err=True
                )
            finished, total, started = finished_rows, all_rows, True
            update(f"{finished} of {total} combinations", finished, total)

        try:
            yield progress
        except KeyboardInterrupt:
            typer.echo(
                f"ebbtide: stopped: {finished} of {total} combinations are finished; run the same command again to "
                "continue",
                err=True,
            )
            raise


def print_sweep(rows: list[Row], output: Path, as_json: bool) -> None:
    """Print the tables of a sweep, or one JSON object that contains the path; its path otherwise on stderr."""
    if as_json:
        from ebbtide.interleave.experiments.sweep.best import BASELINE, find_best

        summary = {
            "output": str(output),
            "rows": len(rows),
            "errors": sum(bool(row["error"]) for row in rows),
            "baseline": BASELINE,
            "best": [item.as_json() for item in find_best(rows)],
        }
        echo(json.dumps(summary))
        return
    from ebbtide.interleave.experiments.sweep.best import sweep_view

    print_view(sweep_view(rows, output))
    typer.echo(f"ebbtide: {output}", err=True)
