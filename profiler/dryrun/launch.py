"""Starts the process of a dry run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ebbtide.errors import TraceError
from ebbtide.machines.machine import Machine
from ebbtide.profiler.dryrun.errors import DryRunError
from ebbtide.profiler.dryrun.launchers import TORCHRUN, find_script, stated_ranks

_PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X")


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
    """Become a dry run with settings as in `DryRunOptions`; ranks that are not stated are those of a launcher."""
    python, options, job = split_command(command)
    settings = {**settings, "ranks": settings["ranks"] or stated_ranks(job)}
    own = ["-P", "-m", "ebbtide.profiler.dryrun", str(output), json.dumps(settings)]
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
    if Path(program).name == "torchrun":
        return sys.executable, [], ["-m", TORCHRUN, *words]
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
