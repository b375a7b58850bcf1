"""What commands write beside what they print: a picture, a folder of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import typer

_FORMATS = (".png", ".svg", ".pdf")


def picture_format(path: Path) -> str:
    """`png`, `svg` or `pdf`, by the ending. Raises BadParameter for another."""
    ending = path.suffix.lower()
    if ending not in _FORMATS:
        raise typer.BadParameter(f"{path} must end in {', '.join(_FORMATS)}: the ending chooses the format")
    return ending[1:]


def check_outputs(plot: Path | None, save: Path | None) -> None:
    """Raise BadParameter for a picture and a folder of schedules that cannot be."""
    if plot is not None:
        picture_format(plot)
    if plot is not None and save is not None and plot.resolve() == save.resolve():
        raise typer.BadParameter(f"{plot} cannot be both the picture and the schedules: name two paths")


@contextmanager
def new_outputs(plot: Path | None, save: Path | None, force: bool) -> Iterator[tuple[Path | None, Path | None]]:
    """Where to write the picture and the schedules: they stand whole, or not at all."""
    from ebbtide.output_files import new_output

    with ExitStack() as outputs:
        picture = outputs.enter_context(new_output(plot, force, Path.is_file, "a file")) if plot else None
        folder = outputs.enter_context(new_output(save, force, _is_saved, "a folder of traces")) if save else None
        yield picture, folder


def tell_outputs(*paths: Path | None) -> None:
    """On stderr, what was written."""
    for path in paths:
        if path is not None:
            typer.echo(f"ebbtide: {path}", err=True)


def _is_saved(folder: Path) -> bool:
    from ebbtide.profiler.trace.files import is_trace

    return folder.is_dir() and all(is_trace(inside) for inside in folder.iterdir())
