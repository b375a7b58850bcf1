"""Prints the progress and the results of a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ebbtide.cli.render.progress import progress_bar
from ebbtide.cli.render.tables import MAX_ROWS, print_table
from ebbtide.units import bytes_text, count_text, ms_text

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.sweep import BestPolicy, Row


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
    """Print the best policy of each workload, machine and scenario; on stderr the path of the table.

    With `as_json` one JSON object is printed instead, which contains the path.
    """
    from ebbtide.interleave.experiments.sweep import BASELINE, find_best

    best = find_best(rows)
    errors = [str(row["error"]) for row in rows if row["error"]]
    if as_json:
        summary = {
            "output": str(output),
            "rows": len(rows),
            "errors": len(errors),
            "baseline": BASELINE,
            "best": [item.as_json() for item in best],
        }
        typer.echo(json.dumps(summary))
        return
    columns = ["best policy", "iteration", "speed-up", "above the bound", "fits"]
    table_rows = [_figures(item) for item in best]
    scenarios = _scenario_columns(best)
    # Columns with the same value in every row become one line above the table.
    constant = [name for name, values in scenarios.items() if len(set(values)) == 1]
    if constant:
        typer.echo(", ".join(f"{name}: {scenarios[name][0]}" for name in constant))
    for name in reversed([name for name in scenarios if name not in constant]):
        columns.insert(0, name)
        table_rows = [[value, *table_row] for value, table_row in zip(scenarios[name], table_rows, strict=True)]
    title = f"The best policy that fits (speed-up over {BASELINE} with the same subgroups)"
    print_table(title, columns, table_rows[:MAX_ROWS])
    if len(best) > MAX_ROWS:
        typer.echo(f"{len(best) - MAX_ROWS} more in {output}")
    if errors:
        typer.echo(f"{len(errors)} of {len(rows)} combinations cannot be replayed; the first: {errors[0]}")
    typer.echo(f"ebbtide: {output}", err=True)


def _scenario_columns(best: list[BestPolicy]) -> dict[str, list[str]]:
    """Return the columns that identify the scenario of each row, by their headings."""
    return {
        "workload": [item.workload for item in best],
        "machine": [item.machine for item in best],
        "parameters": [count_text(item.row["params"]) if item.row else f"{item.scale_params:g} x" for item in best],
        "always free": [bytes_text(item.row["least_free_bytes"] if item.row else item.free_bytes) for item in best],
        "subgroup": [count_text(item.row["largest_subgroup_params"] if item.row else None) for item in best],
    }


def _figures(best: BestPolicy) -> list[str]:
    row = best.row
    if row is None:
        return ["none fits", "-", "-", "-", "-"]
    return [
        row["policy"] if row["exact"] else f"{row['policy']} (not exact)",
        ms_text(row["iteration_ms"]),
        "-" if best.speed_up is None else f"{best.speed_up:.2f}x",
        "-" if best.above_bound is None else f"{100 * best.above_bound:.1f} %",
        "yes" if row["fits"] else "not known",
    ]
