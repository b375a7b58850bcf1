"""Prints the progress and the results of a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ebbtide.cli.printing import echo
from ebbtide.cli.render.progress import progress_bar
from ebbtide.cli.render.tables import MAX_ROWS, print_table
from ebbtide.units import bytes_text, count_text, ms_text

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.sweep import BestPolicy, Row

_BYTES = ("device memory", "host memory", "storage traffic")
_FITS = {True: "yes", False: "no", None: "not known"}


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
    """Print the best policy of each workload, machine and scenario, and all rows of a small sweep.

    The path of the table is printed on stderr.

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
        echo(json.dumps(summary))
        return
    scenarios = _scenario_columns(best)
    # Columns with the same value in every row become one line above the table.
    constant = [name for name, values in scenarios.items() if len(set(values)) == 1]
    if constant:
        echo(", ".join(f"{name}: {scenarios[name][0]}" for name in constant))
    names = [name for name in scenarios if name not in constant]
    # A second table has the bytes of every row, if there are few.
    has_rows = len(best) < len(rows) <= MAX_ROWS
    figures = [_figures(item, with_bytes=not has_rows) for item in best]
    print_table(
        f"The best policy that fits (speed-up over {BASELINE} with the same subgroups)",
        [*names, "best policy", "iteration", "speed-up", "above the bound", "fits", *(() if has_rows else _BYTES)],
        [[*(scenarios[name][number] for name in names), *row] for number, row in enumerate(figures)][:MAX_ROWS],
    )
    if len(best) > MAX_ROWS:
        echo(f"{len(best) - MAX_ROWS} more in {output}")
    if has_rows:
        _print_rows(rows)
    if errors:
        echo(f"{len(errors)} of {len(rows)} combinations cannot be replayed; the first: {errors[0]}")
    typer.echo(f"ebbtide: {output}", err=True)


def _print_rows(rows: list[Row]) -> None:
    """Print the iteration, memory and traffic of storage of every combination."""
    keys = {"workload": "workload", "machine": "machine", "scale_params": "parameters"}
    keys |= {"free_bytes": "always free", "subgroup_params": "subgroup", "host_free_bytes": "free host memory"}
    texts: dict[str, Callable[[Any], str]] = {
        "scale_params": lambda value: f"{value:g} x",
        "free_bytes": bytes_text,
        "host_free_bytes": bytes_text,
        "subgroup_params": count_text,
    }
    swept = [key for key in keys if len({row[key] for row in rows}) > 1]
    table_rows: list[list[str]] = []
    before: list[str] = []
    for row in rows:
        scenario = [texts.get(key, str)(row[key]) for key in swept]
        # Each scenario is named once.
        shown = [""] * len(swept) if scenario == before else scenario
        figures = ["cannot be replayed", *["-"] * 5] if row["error"] else _row_figures(row)
        table_rows.append([*shown, row["policy"], *figures])
        before = scenario
    print_table(
        "All combinations", [*(keys[key] for key in swept), "policy", "iteration", *_BYTES, "fits", "exact"], table_rows
    )


def _row_figures(row: Row) -> list[str]:
    return [ms_text(row["iteration_ms"]), *_bytes_texts(row), _FITS[row["fits"]], "yes" if row["exact"] else "no"]


def _bytes_texts(row: Row) -> list[str]:
    """Return device memory, host memory, and the traffic of storage."""
    sizes = (row["peak_device_bytes"], row["host_bytes"], row["storage_read_bytes"] + row["storage_written_bytes"])
    return [bytes_text(size) for size in sizes]


def _scenario_columns(best: list[BestPolicy]) -> dict[str, list[str]]:
    """Return the columns that identify the scenario of each row, by their headings."""
    columns = {
        "workload": [item.workload for item in best],
        "machine": [item.machine for item in best],
        "parameters": [count_text(item.row["params"]) if item.row else f"{item.scale_params:g} x" for item in best],
        "always free": [bytes_text(item.row["least_free_bytes"] if item.row else item.free_bytes) for item in best],
        "subgroup": [count_text(item.row["largest_subgroup_params"] if item.row else None) for item in best],
    }
    if any(item.host_free_bytes is not None for item in best):
        columns["free host memory"] = [bytes_text(item.host_free_bytes) for item in best]
    return columns


def _figures(best: BestPolicy, with_bytes: bool) -> list[str]:
    row = best.row
    if row is None:
        return ["none fits", *["-"] * (4 + len(_BYTES) * with_bytes)]
    return [
        row["policy"] if row["exact"] else f"{row['policy']} (not exact)",
        ms_text(row["iteration_ms"]),
        "-" if best.speed_up is None else f"{best.speed_up:.2f}x",
        "-" if best.above_bound is None else f"{100 * best.above_bound:.1f} %",
        _FITS[row["fits"]],
        *(_bytes_texts(row) if with_bytes else []),
    ]
