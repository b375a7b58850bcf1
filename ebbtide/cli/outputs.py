"""Output files that commands write in addition to what they print: a picture, a folder of traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ebbtide.cli.printing import echo_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")


def picture_format(path: Path) -> str:
    """Return `png`, `svg` or `pdf` by the ending of a path. Raises BadParameter for any other ending."""
    ending = path.suffix.lower()
    if ending not in _FORMATS:
        raise typer.BadParameter(f"{path} must end in {', '.join(_FORMATS)}, which selects the format")
    return ending[1:]


def check_outputs(plot: Path | None, save: Path | None) -> None:
    """Raise BadParameter if the paths of the picture and of the folder of traces are invalid."""
    if plot is not None:
        picture_format(plot)
    if plot is not None and save is not None and plot.resolve() == save.resolve():
        raise typer.BadParameter(f"{plot} cannot be both the picture and the folder of traces: choose two paths")


@contextmanager
def new_outputs(plot: Path | None, save: Path | None, force: bool) -> Iterator[tuple[Path | None, Path | None]]:
    """Yield temporary paths for the picture and the folder of traces, which appear complete or not at all."""
    from ebbtide.output_files import new_output

    with ExitStack() as outputs:
        picture = outputs.enter_context(new_output(plot, force, Path.is_file, "a file")) if plot else None
        folder = (
            outputs.enter_context(new_output(save, force, _is_folder_of_traces, "a folder of traces")) if save else None
        )
        yield picture, folder


def save_picture(figure: Figure, file: Path, path: Path | None) -> None:
    """Write a picture into the temporary file of a path, whose ending selects the format."""
    from ebbtide.analysis.plot import save

    assert path is not None
    save(figure, file, picture_format(path))


def print_outputs(*paths: Path | None) -> None:
    """Print the paths of written outputs on stderr."""
    for path in paths:
        if path is not None:
            echo_error(str(path))


def _is_folder_of_traces(folder: Path) -> bool:
    from ebbtide.profiler.trace.files import is_trace

    return folder.is_dir() and all(is_trace(path) for path in folder.iterdir())
