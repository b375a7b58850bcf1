"""Output files that commands write beside what they print: a picture, and a folder of
traces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ebbtide.terminal_lines import print_note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")


def picture_format(path: Path) -> str:
    """Return `png`, `svg` or `pdf` by the ending of a path. Raises BadParameter for any
    other ending."""
    ending = path.suffix.lower()
    if ending not in _FORMATS:
        raise typer.BadParameter(
            f"{path} must end in {', '.join(_FORMATS)}, which selects the format"
        )
    return ending[1:]


def check_outputs(pictures: Sequence[Path | None], other: Path | None = None) -> None:
    """Raise BadParameter if the paths of pictures and of another output are invalid."""
    for picture in filter(None, pictures):
        picture_format(picture)
    outputs = [path for path in (*pictures, other) if path is not None]
    for path, later in itertools.combinations(outputs, 2):
        if path.resolve() == later.resolve():
            raise typer.BadParameter(f"{path} cannot be both outputs: choose two paths")


@contextmanager
def new_outputs(
    plot: Path | None, save: Path | None, force: bool
) -> Iterator[tuple[Path | None, Path | None]]:
    """Yield temporary paths for the picture and the folder of traces, which appear
    complete or not at all."""
    from ebbtide.output_files import new_output

    with ExitStack() as outputs:
        picture = (
            outputs.enter_context(new_output(plot, force, Path.is_file, "a file"))
            if plot
            else None
        )
        folder = (
            outputs.enter_context(
                new_output(save, force, _is_folder_of_traces, "a folder of traces")
            )
            if save
            else None
        )
        yield picture, folder


def save_picture(figure: Figure, file: Path, path: Path | None) -> None:
    """Write a picture into the temporary file of a path.

    The ending of the path selects the format.
    """
    from ebbtide.analysis.plot import save

    assert path is not None
    save(figure, file, picture_format(path))


def print_outputs(*paths: Path | None) -> None:
    """Print the paths of written outputs on stderr."""
    for path in paths:
        if path is not None:
            print_note(str(path))


def _is_folder_of_traces(folder: Path) -> bool:
    from ebbtide.profiler.trace.files import is_trace

    return folder.is_dir() and all(is_trace(path) for path in folder.iterdir())
