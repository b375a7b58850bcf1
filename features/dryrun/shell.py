"""Follows programs that are not Python, such as `env` and shell scripts, to the Python
job that they start.

The program runs as it is, with a folder of stand-ins for `python` and for launchers
first in its search path. A stand-in runs the job as a dry run; after one that has
iterations the others are left out.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.features.dryrun.launch import (
    MAX_SHEBANG,
    become_dry_run,
    find_script,
    is_python_job,
)
from ebbtide.profiler.trace import open_trace
from ebbtide.terminal_lines import print_note

_NAMES = ("python", "python3", "torchrun", "accelerate", "deepspeed")
_FOLDER, _STATE = "EBBTIDE_DRY_RUN_FOLDER", "state.json"
# Programs that start another one on this host, once.
_PROGRAMS = frozenset(
    {"bash", "sh", "dash", "zsh", "ksh", "env", "nice", "nohup", "time", "timeout",
     "numactl", "taskset", "stdbuf", "ionice", "setsid", "make", "xvfb-run"}
)  # fmt: skip


def starts_job(program: str) -> bool:
    """Return whether a program is a shell, one of its scripts, or one that starts
    another program."""
    if Path(program).name in _PROGRAMS:
        return True
    path = shutil.which(program)
    if path is None:
        return False
    with open(path, "rb") as file:
        interpreter = file.readline(MAX_SHEBANG).removeprefix(b"#!").split()
    names = {Path(os.fsdecode(word)).name for word in interpreter}
    return bool(names & _PROGRAMS) and find_script(path) is None


def run_program(
    command: Sequence[str], output: Path, settings: Mapping[str, Any]
) -> int:
    """Run a program whose first Python job with iterations is the job of the dry run,
    and return its exit status: 2 where it starts none."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        for name in _NAMES:
            path = Path(folder) / name
            path.write_text(
                f"#!/bin/sh\nexec {sys.executable} -P -m ebbtide.features.dryrun.shell "
                f'{name} "$@"\n'
            )
            path.chmod(0o755)
        search = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        state = json.dumps({"output": str(output), "settings": settings})
        Path(folder, _STATE).write_text(state)
        environment = os.environ | {"PATH": search, _FOLDER: folder}
        status = subprocess.call(list(command), env=environment)
        started = _count_path(folder).exists()
    if started:
        return status if status >= 0 else 128 - status
    print_note(f"{command[0]} started no Python job: name the script that trains")
    return status or 2


def _count_path(folder: str) -> Path:
    return Path(folder) / "started"


def run_stand_in(command: list[str]) -> int:
    """Run a command of Python that a program has started, and return its status."""
    folder = os.environ.pop(_FOLDER)
    state = json.loads(Path(folder, _STATE).read_text())
    output = Path(state["output"])
    paths = os.environ["PATH"].split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(path for path in paths if path != folder)
    if not is_python_job(command):
        return subprocess.call([sys.executable, *command[1:]])
    count = _count_path(folder)
    if count.exists() and _has_iterations(output):
        print_note(f"left out, since a job has been run: {' '.join(command)}")
        return 0
    settings = state["settings"]
    settings["force"] |= count.exists()
    count.touch()
    job = os.fork()
    if not job:
        become_dry_run(command, output, settings, os.environ)
    _, status = os.waitpid(job, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _has_iterations(output: Path) -> bool:
    prediction = open_trace(output).meta.prediction if output.exists() else None
    return prediction is not None and bool(prediction.times)


if __name__ == "__main__":
    sys.exit(run_stand_in(sys.argv[1:]))
