"""`ebbtide watch`: a view of a recording while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN.ebb]", help="Trace to watch.", show_default="the newest one that is recorded here"
        ),
    ] = None,
) -> None:
    """Show a recording in the terminal while it runs: phases, memory, link, windows, ranks, findings.

    A finished trace is shown in the same way. The job is not touched.
    """
    from ebbtide.cli.live_view.choice import newest_recording
    from ebbtide.cli.live_view.terminal import require_terminal, show

    require_terminal("watch", f"`ebbtide summary {trace or 'RUN.ebb'}` prints a trace without one")
    show(trace if trace is not None else newest_recording(Path()))
