"""Starts the process of a dry run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ebbtide.errors import TraceError
from ebbtide.machines.machine import Machine
from ebbtide.profiler.dryrun.errors import DryRunError
from ebbtide.profiler.dryrun.launchers import read_launcher

_PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X")


def dry_run(
    command: Sequence[str],
    output: Path,
    iterations: int = 2,
    capacity_bytes: int | None = None,
    machine: Machine | None = None,
    force: bool = False,
    ranks: int | None = None,
) -> NoReturn:
    """Become the process of a dry run, whose exit status is that of the job, or 2 where something cannot be faked.

    Args:
        command: The job: `python train.py ...`, `torchrun ... train.py ...`, or a script alone.
        output: The trace to write.
        iterations: Iterations after which the job is ended.
        capacity_bytes: Memory of the device; None: that of the machine.
        machine: The machine; None: not named.
        force: Whether to replace a trace that exists.
        ranks: Ranks of the job, whose rank 0 is run; None: those that torchrun would start, else not stated.

    Raises:
        DryRunError: The command does not start a Python script.
        TraceError: The output exists.
    """
    launched = read_launcher(command)
    python, options, job = split_command(launched.command)
    if os.path.lexists(output) and not force:
        raise TraceError(f"{output} exists already: choose another path, or replace it (--force)")
    if capacity_bytes is None and machine is not None and machine.gpu_memory_bytes:
        capacity_bytes = round(machine.gpu_memory_bytes)
    settings = {
        "iterations": iterations,
        "capacity_bytes": capacity_bytes,
        "device_name": _device_name(machine),
        "machine": machine.as_json() if machine is not None else None,
        "force": force,
        "ranks": ranks or launched.ranks,
        "ranks_per_node": launched.ranks_per_node,
    }
    words = [python, *options, "-P", "-m", "ebbtide.profiler.dryrun", str(output), json.dumps(settings), *job]
    sys.stdout.flush()
    os.execv(python, words)


def _device_name(machine: Machine | None) -> str:
    """Return the name that torch reports for the GPU of a machine."""
    if machine is None:
        return "dry run"
    return (machine.gpu and machine.gpu.name) or machine.name


def split_command(command: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the interpreter of a command, its options, and the rest: a script, `-m MODULE` or `-c CODE`.

    `python` without a folder is the interpreter that runs ebbtide, since the dry run needs both.

    Raises:
        DryRunError: The command does not start a Python script.
    """
    program, *words = command
    if program.endswith(".py"):
        return sys.executable, [], list(command)
    if not Path(program).name.startswith("python"):
        raise DryRunError(
            f"a dry run needs a Python script, as in `ebbtide dry-run -- python train.py`; {program} is none: "
            "in place of a launcher (accelerate, deepspeed) name the script that it starts, and state its ranks "
            "with --ranks"
        )
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
