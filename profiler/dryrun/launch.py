"""Starts the process of a dry run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ebbtide.errors import TraceError
from ebbtide.machines.machine import Machine
from ebbtide.profiler.dryrun.errors import DryRunError
from ebbtide.profiler.dryrun.launchers import find_script, stated_ranks

_PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FLAGS = ("--standalone", "--virtual-local-rank", "--use-env")
_VALUES = (
    "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval",
    "--start-method", "--event-log-handler", "--role", "--log-dir", "--local-ranks-filter", "--node-rank",
    "--master-addr", "--master-port", "--local-addr", "--logs-specs", "--numa-binding", "--signals-to-handle",
    "--shutdown-timeout", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
)  # fmt: skip


def dry_run(
    command: Sequence[str],
    output: Path,
    iterations: int = 2,
    capacity_bytes: int | None = None,
    machine: Machine | None = None,
    force: bool = False,
    ranks: int | None = None,
    printer: str | None = None,
    check: bool = False,
    scratch: Path | None = None,
) -> NoReturn:
    """Become the process of a dry run, whose exit status is that of the job, or 2 where something cannot be faked.

    Args:
        capacity_bytes: Memory of the device; None: that of the machine.
        machine: The machine; None: not named.
        ranks: Ranks of the job, whose rank 0 is run; None: those that torchrun would start, else not stated.
        printer: `module:function` that is called with the path of the trace when it is written, and returns whether the
            job fits; None: nothing is.
        check: Whether the exit status is 3 where it does not fit.
        scratch: A folder of the job that is removed at the end; None: it has none.
    """
    refuse_existing(output, force)
    if capacity_bytes is None and machine is not None and machine.gpu_memory_bytes:
        capacity_bytes = round(machine.gpu_memory_bytes)
    settings = {
        "iterations": iterations,
        "capacity_bytes": capacity_bytes,
        "device_name": _device_name(machine),
        "machine": machine.as_json() if machine is not None else None,
        "force": force,
        "printer": printer,
        "check": check,
        "scratch": str(scratch) if scratch is not None else None,
        "ranks": ranks,
        "ranks_per_node": None,
    }
    become_dry_run(command, output, settings, os.environ)


def refuse_existing(output: Path, force: bool) -> None:
    """Raise TraceError if a trace exists and is not to be replaced."""
    if os.path.lexists(output) and not force:
        raise TraceError(f"{output} exists already: choose another path, or replace it (--force)")


def become_dry_run(
    command: Sequence[str], output: Path, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> NoReturn:
    """Become the process of a dry run with settings as `DryRunOptions` has them; ranks are those of a launcher where
    they are not stated."""
    launched = read_launcher(command)
    python, options, job = split_command(launched.command)
    stated = settings["ranks"] or launched.ranks or stated_ranks(job)
    ranks = {"ranks": stated, "ranks_per_node": launched.ranks_per_node or settings["ranks_per_node"]}
    own = ["-P", "-m", "ebbtide.profiler.dryrun", str(output), json.dumps({**settings, **ranks})]
    sys.stdout.flush()
    os.execve(python, [python, *options, *own, *job], dict(environment))


def _device_name(machine: Machine | None) -> str:
    """Return the name that torch reports for the GPU of a machine."""
    if machine is None:
        return "dry run"
    return (machine.gpu and machine.gpu.name) or machine.name


def split_command(command: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the interpreter of a command, its options, and the rest: a script, `-m MODULE` or `-c CODE`.

    `python` without a folder is the interpreter that runs ebbtide, since the dry run needs both. It also runs console
    scripts, such as `accelerate`.
    """
    program, *words = command
    if program.endswith(".py"):
        return sys.executable, [], list(command)
    if not Path(program).name.startswith("python"):
        script = find_script(program)
        if script is None:
            raise DryRunError(
                f"a dry run needs a Python program, as in `ebbtide dry-run -- python train.py`; {program} is "
                f"{'none' if shutil.which(program) else 'not found'}: name the script that it starts, and its ranks "
                "with --ranks"
            )
        return sys.executable, [], [script, *words]
    python = sys.executable if os.sep not in program else shutil.which(program)
    if python is None:
        raise DryRunError(f"cannot run {program}: no such program")
    options = []
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        count = 2 if words[0] in _PYTHON_OPTIONS_WITH_VALUE else 1
        options += words[:count]
        words = words[count:]
    if not words or (words[0] in ("-m", "-c") and len(words) < 2):
        raise DryRunError("a dry run needs a Python script, as in `ebbtide dry-run -- python train.py`")
    return python, options, words


@dataclass(frozen=True)
class LaunchedJob:
    """A job that a launcher starts.

    Attributes:
        ranks: Processes in all; None: there is no launcher.
        ranks_per_node: Processes on one host; None: not stated.
    """

    command: list[str]
    ranks: int | None = None
    ranks_per_node: int | None = None


def read_launcher(command: Sequence[str]) -> LaunchedJob:
    """Return what `torchrun` or `python -m torch.distributed.run` would start; any other command as it is."""
    program, *words = command
    python = "python"
    if words[:1] == ["-m"] and words[1:2] and words[1] in _MODULES:
        python, words = program, words[2:]
    elif Path(program).name != "torchrun":
        return LaunchedJob(list(command))
    options = _parser().parse_args(words)
    if options.no_python or options.run_path or not options.script:
        raise DryRunError("a dry run needs the Python script that torchrun starts, as in `torchrun ... train.py`")
    per_node, nodes = _number(options.nproc_per_node, "--nproc-per-node"), _nodes(options.nnodes)
    script = ["-m", options.script] if options.module else [options.script]
    return LaunchedJob([python, *script, *options.arguments], per_node * nodes, per_node)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DryRunError(f"torchrun: {message}")


def _parser() -> argparse.ArgumentParser:
    """Return a parser of torchrun's options, with either `-` or `_` in their names."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(*_spellings("--nproc-per-node"), default="1")
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument(*_spellings("--no-python"), action="store_true")
    parser.add_argument(*_spellings("--run-path"), action="store_true")
    parser.add_argument("-r", "--redirects")
    parser.add_argument("-t", "--tee")
    for name in _FLAGS:
        parser.add_argument(*_spellings(name), action="store_true")
    for name in _VALUES:
        parser.add_argument(*_spellings(name))
    parser.add_argument("script", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _spellings(name: str) -> tuple[str, ...]:
    other = "--" + name.removeprefix("--").replace("-", "_")
    return (name,) if other == name else (name, other)


def _nodes(text: str) -> int:
    return _number(text.rpartition(":")[2], "--nnodes")


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or not int(text):
        raise DryRunError(f"torchrun: {name} is {text!r}; a dry run needs a number, as in {name} 8")
    return int(text)
