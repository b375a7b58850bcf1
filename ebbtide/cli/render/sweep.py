"""What `ebbtide sweep` tells while it runs, and at its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ebbtide.cli.render.tables import table
from ebbtide.units import bytes_text, count_text, ms_text

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.sweep import Best, Row

# A person reads no more lines than these.
_MOST_LINES = 40


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """A bar where somebody looks at it; what was finished before, and what is when it is stopped, is told anywhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    state = [-1, 0]
    console = Console(stderr=True)
    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        line = bar.add_task("combinations")

        def tell(finished: int, total: int) -> None:
            if state[0] < 0 and finished:
                typer.echo(f"ebbtide: going on: {finished} of {total} combinations were finished before", err=True)
            state[:] = finished, total
            bar.update(line, completed=finished, total=total)

        try:
            yield tell
        except KeyboardInterrupt:
            typer.echo(
                f"ebbtide: stopped: {state[0]} of {state[1]} combinations are kept, the same command goes on", err=True
            )
            raise


def tell_best(rows: list[Row], output: Path, as_json: bool) -> None:
    from ebbtide.interleave.experiments.sweep import BASELINE, best_of

    best = best_of(rows)
    errors = [str(row["error"]) for row in rows if row["error"]]
    if as_json:
        found = [item.as_json() for item in best]
        told = {"rows": len(rows), "errors": len(errors), "baseline": BASELINE, "best": found}
        typer.echo(json.dumps({"output": str(output), **told}))
        return
    columns = ["best policy", "iteration", "speed-up", "above the bound", "fits"]
    lines = [_figures(item) for item in best]
    # What is the same in every line is told once.
    places = _places(best)
    alike = [place for place, names in places.items() if len(set(names)) == 1]
    if alike:
        typer.echo(", ".join(f"{place}: {places[place][0]}" for place in alike))
    for place in reversed([place for place in places if place not in alike]):
        columns.insert(0, place)
        lines = [[name, *line] for name, line in zip(places[place], lines, strict=True)]
    title = f"The best policy that fits (speed-up over {BASELINE} with the same subgroups)"
    table(title, columns, lines[:_MOST_LINES])
    if len(best) > _MOST_LINES:
        typer.echo(f"and {len(best) - _MOST_LINES} more in {output}")
    if errors:
        typer.echo(f"{len(errors)} of {len(rows)} combinations cannot be replayed; the first: {errors[0]}")
    typer.echo(f"ebbtide: {output}", err=True)


def _places(best: list[Best]) -> dict[str, list[str]]:
    """Which question each line answers."""
    return {
        "workload": [item.workload for item in best],
        "machine": [item.machine for item in best],
        "parameters": [count_text(item.row["params"]) if item.row else f"{item.scale_params:g} x" for item in best],
        "always free": [bytes_text(item.row["least_free_bytes"] if item.row else item.free_bytes) for item in best],
        "subgroups of": [count_text(item.row["largest_subgroup_params"] if item.row else None) for item in best],
    }


def _figures(best: Best) -> list[str]:
    row = best.row
    if row is None:
        return ["none fits", "-", "-", "-", "-"]
    return [
        row["policy"],
        ms_text(row["iteration_ms"]),
        "-" if best.speed_up is None else f"{best.speed_up:.2f}x",
        "-" if best.above_bound is None else f"{100 * best.above_bound:.1f} %",
        "yes" if row["fits"] else "not known",
    ]
