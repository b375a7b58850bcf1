"""Shows the progress of a command on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Called with a description of the current work, the amount that is done, and the total.
ProgressUpdate = Callable[[str, float, float], None]


@contextmanager
def progress_bar() -> Iterator[ProgressUpdate]:
    """Show a progress bar on stderr for the block; nothing if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda description, done, total: bar.update(task, description=description, completed=done, total=total)
