"""Starts a dry run: in the environment of ebbtide, or in another one, whose record
becomes a trace here."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import ebbtide
from ebbtide.errors import TraceError
from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.features.dryrun.launch import become_dry_run, dry_run_command
from ebbtide.features.dryrun.record import load_record
from ebbtide.features.dryrun.result import exit_status
from ebbtide.features.dryrun.shell import run_program, starts_job
from ebbtide.machines.machine import Machine

_GUEST = Path(ebbtide.__file__).parent / "features" / "dryrun" / "guest.py"
_OLDEST_PYTHON = (3, 11)
# Prints the version of an interpreter, and whether it finds torch.
_PROBE = (
    "import importlib.util as u, json, sys;"
    "print(json.dumps([sys.version_info[:2], u.find_spec('torch') is not None]))"
)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Options of the command.

    Attributes:
        iterations: Iterations after which the job is ended.
        capacity_bytes: Memory of the device; None: the machine's.
        machine: The machine; None: not named.
        force: Whether a trace is replaced.
        ranks: Ranks of the job, whose rank 0 is run; None: those that torchrun would
            start, else not stated.
        prints: Whether the result is printed, as `ebbtide dry-run` does.
        check: Whether a job that does not fit has an exit status of its own.
        scratch: A folder of the job that is removed at the end; None: it has none.
        python: Interpreter of the environment that the job runs in; None: ebbtide's
            own.
    """

    iterations: int = 2
    capacity_bytes: int | None = None
    machine: Machine | None = None
    force: bool = False
    ranks: int | None = None
    prints: bool = False
    check: bool = False
    scratch: Path | None = None
    python: str | None = None


def dry_run(command: Sequence[str], output: Path, options: StartOptions) -> NoReturn:
    """Become the process of a dry run, which ends with the exit status of the job, or
    with 2 where something cannot be faked."""
    refuse_existing(output, options.force)
    capacity_bytes, machine = options.capacity_bytes, options.machine
    if capacity_bytes is None and machine is not None and machine.gpu_memory_bytes:
        capacity_bytes = round(machine.gpu_memory_bytes)
    elif capacity_bytes is not None and machine is not None:
        # The trace has the machine that the job ran on, for plans.
        machine = replace(machine, gpu_memory_bytes=float(capacity_bytes))
    settings = {
        "iterations": options.iterations,
        "capacity_bytes": capacity_bytes,
        "device_name": _device_name(machine),
        "machine": machine.as_json() if machine is not None else None,
        "force": options.force,
        "prints": options.prints,
        "check": options.check,
        "scratch": str(options.scratch) if options.scratch is not None else None,
        "ranks": options.ranks,
        "ranks_per_node": None,
    }
    if options.python is None:
        if starts_job(command[0]):
            sys.exit(run_program(command, output, settings))
        become_dry_run(command, output, settings, os.environ)
    sys.exit(_host(options.python, command, output, settings))


def refuse_existing(output: Path, force: bool) -> None:
    """Raise TraceError if a trace exists and is not to be replaced."""
    if os.path.lexists(output) and not force:
        raise TraceError(
            f"{output} exists already: choose another path, or replace it (--force)"
        )


def _device_name(machine: Machine | None) -> str:
    """Return the name that torch reports for the GPU of a machine."""
    if machine is None:
        return "dry run"
    return (machine.gpu and machine.gpu.name) or machine.name


def _host(
    python: str, command: Sequence[str], output: Path, settings: dict[str, Any]
) -> int:
    """Run the job with the interpreter of another environment, write its trace, and
    return the exit status."""
    from ebbtide.features.dryrun.trace_of_run import write_trace

    interpreter = _usable_interpreter(python)
    os.environ["PATH"] = os.pathsep.join(
        (str(Path(interpreter).parent), os.environ.get("PATH", os.defpath))
    )
    guest = {**settings, "guest": str(_GUEST), "prints": False, "check": False}
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        path = Path(folder) / "record"
        words = dry_run_command(command, path, guest, interpreter)
        code = _wait_for([interpreter, *words[1:]])
        if not path.exists():
            return code
        record, job, status = load_record(path)
    write_trace(record, job, status, output, settings["force"])
    return exit_status(output, settings, status)


def _usable_interpreter(python: str) -> str:
    """Return the path of an interpreter that can run a dry run.

    Raises:
        DryRunError: It cannot: what is missing, and how to install it.
    """
    path = shutil.which(python)
    if path is None:
        raise DryRunError(f"--python: there is no program {python}")
    # A link may be an environment of its own.
    path = os.path.abspath(path)
    answer = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True)
    try:
        version, has_torch = json.loads(answer.stdout)
    except ValueError:
        raise DryRunError(f"--python: {python} is no Python") from None
    if tuple(version) < _OLDEST_PYTHON:
        raise DryRunError(
            f"--python: {python} is Python {version[0]}.{version[1]}; a dry run needs "
            "3.11 or newer there"
        )
    if not has_torch:
        raise DryRunError(
            f"--python: {python} has no torch: install it there ({python} -m pip "
            "install torch==2.13.0)"
        )
    return path


def _wait_for(command: list[str]) -> int:
    """Run a command, to which signals that end this process are passed on, and return
    its exit status."""
    sys.stdout.flush()
    process = subprocess.Popen(command)
    # Keys of the terminal reach it by themselves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: process.send_signal(received))
    code = process.wait()
    return code if code >= 0 else 128 - code
