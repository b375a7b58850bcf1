"""The commands that an assistant may call through the Model Context Protocol, as tools
with bounded answers."""

import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

# Under 2,000 tokens: figures and paths have about three characters per token.
MAX_CHARS = 5000
_TIMEOUT_S = 600
_SCREEN = {"COLUMNS": "100", "NO_COLOR": "1"}
_PIPES: Any = {
    "stdin": subprocess.DEVNULL,
    "capture_output": True,
    "text": True,
    "errors": "replace",
}
_INSTRUCTIONS = (
    "ebbtide explains GPU memory and PCIe traffic of training jobs from traces "
    "(folders NAME.ebb). Begin with "
    "findings; a dash is a figure that was not recorded, never 0; predicted traces are "
    "of dry runs, not measured."
)


def make_server(folder: Path) -> MCPServer:
    """Return the server, whose tools run commands in a folder."""

    call = partial(_call, folder)

    def summary(
        trace: str,
        by: Literal[
            "phase", "link", "substep", "activity", "iteration", "rank"
        ] = "phase",
    ) -> str:
        """Time, memory and link use of a trace, by phase or another key: medians over
        its steady iterations."""
        return call("summary", _path(trace), f"--by={by}")

    def findings(trace: str) -> str:
        """List what holds a job back, root cause first, with evidence, estimated gain
        and remedy."""
        return call("findings", _path(trace))

    def windows(trace: str, min_bytes: str = "1GiB") -> str:
        """List when at least so much device memory is free, for how long, and whether
        the link is idle then."""
        return call("windows", _path(trace), f"--min-bytes={min_bytes}")

    def replay(trace: str, machine: str = "", policies: list[str] | None = None) -> str:
        """Predict iteration times of offload policies for a trace: by simulation, not
        by a run."""
        options = [f"--machine={machine}"] if machine else []
        return call(
            "replay",
            _path(trace),
            *options,
            *(f"--policy={policy}" for policy in policies or ()),
        )

    def plan(
        trace: str = "", params: str = "", machines: list[str] | None = None
    ) -> str:
        """Say whether a job (a trace, or a number of parameters like 13B) fits on
        machines, and the least change that makes it fit."""
        job = [_path(trace)] if trace else [f"--params={params}"]
        return call(
            "plan", *job, *(f"--machine={machine}" for machine in machines or ())
        )

    def dry_run(
        command: str, output: str, gpu: str = "h100-80gb", options: str = ""
    ) -> str:
        """Run a script (like `python train.py --steps 3`) without a GPU, to predict its
        memory and its time; writes a trace, which the other tools read. The script
        itself is executed on this host."""
        return call(
            "dry-run",
            f"--gpu={gpu}",
            "-o",
            _path(output),
            *shlex.split(options),
            "--",
            *shlex.split(command),
        )

    server = MCPServer("ebbtide", instructions=_INSTRUCTIONS)
    for tool in (summary, findings, windows, replay, plan, dry_run):
        server.tool()(tool)
    return server


def _call(folder: Path, *words: str) -> str:
    """Run a command in a folder and return what it prints, within the bounds."""
    command = [sys.executable, "-m", "ebbtide", *words]
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **_SCREEN},
            timeout=_TIMEOUT_S,
            **_PIPES,
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"it did not end within {_TIMEOUT_S} s") from None
    if run.returncode:
        raise ToolError(_bounded(run.stderr.strip() or run.stdout, from_end=True))
    # The screen of a dry run is on stderr, since standard output is the job's.
    return _bounded(run.stderr if words[0] == "dry-run" else run.stdout)


def _path(text: str) -> str:
    """Return a path that is not taken for an option."""
    return f"./{text}" if text.startswith("-") else text


def _bounded(text: str, from_end: bool = False) -> str:
    if len(text) <= MAX_CHARS:
        return text
    note = f"[{MAX_CHARS:,} of {len(text):,} characters; the command itself prints all]"
    return f"{note}\n{text[-MAX_CHARS:]}" if from_end else f"{text[:MAX_CHARS]}\n{note}"
