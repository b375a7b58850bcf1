"""`ebbtide watch`: a view of a recording while it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Metrics, metrics_server
from ebbtide.errors import UserError
from ebbtide.terminal_lines import print_note
from ebbtide.urls import Url


@command(
    "Record", 1, shares_stdout=True, examples=("watch", "watch run.ebb --metrics 9400")
)
def watch(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN.ebb]",
            help="Trace to watch.",
            show_default="the newest one that is recorded here",
        ),
    ] = None,
    metrics: Metrics = None,
    view: Annotated[
        bool,
        typer.Option(
            "--view/--no-view",
            help=(
                "Show the view; without it --metrics serves until Ctrl-C, as it does "
                "where there is no terminal."
            ),
            show_default="view",
        ),
    ] = True,
) -> None:
    """Show a recording in the terminal while it runs: phases, memory, link, windows,
    ranks, findings.

    A finished trace is shown in the same way. The job is not touched."""
    from ebbtide.features.live.trace import LiveTrace
    from ebbtide.features.live.view.snapshot import newest_recording
    from ebbtide.features.live.view.terminal import require_terminal, show

    if isinstance(trace, Url):
        raise UserError(
            "watch follows the files of a recorder on this machine, several times a "
            f"second, and {trace} is elsewhere: `ebbtide summary {trace}` reads what "
            "was copied there so far, at most a minute old"
        )
    if not view and metrics is None:
        raise typer.BadParameter(
            "--no-view is for --metrics: name a port, or leave it out to see the view"
        )
    view &= metrics is None or sys.stdout.isatty()
    if view:
        require_terminal(
            "watch",
            f"`ebbtide summary {trace or 'RUN.ebb'}` prints a trace without one",
        )
    path = trace if trace is not None else newest_recording(Path())
    if metrics is None:
        show(path)
        return
    # A path that is no trace is one line, not an empty answer.
    LiveTrace(path).poll()
    with metrics_server(metrics) as server:
        server.start(path)
        print_note(f"metrics of {path}: {server.url}")
        if view:
            show(path)
        else:
            server.wait()
