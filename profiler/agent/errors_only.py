"""Makes the trace of a process that records out-of-memory errors alone: when the first one happens."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import socket
import sys
import time

# As in `profiler/trace/schema.py`, which the agent does not import.
SPOOL = "spool"
FORMAT = {"format": "ebbtide-trace", "schema": 1}


def spool_folder(path: str) -> str:
    """Return the spools of a new trace: PATH, else PATH-2, ... All ranks look before the first error."""
    stem, extension = os.path.splitext(os.path.abspath(path))
    for number in itertools.count(1):
        trace = f"{stem}{'' if number == 1 else f'-{number}'}{extension}"
        if not os.path.exists(os.path.join(trace, "meta.json")):
            return os.path.join(trace, SPOOL)
    raise AssertionError


def write_first_files(spools: str) -> None:
    """Create a trace and its folder of spools, unless another rank has."""
    os.makedirs(spools, exist_ok=True)
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    host = socket.gethostname()
    meta = {
        **FORMAT,
        "state": "recording",
        "source": "recorded",
        "command": list(getattr(sys, "orig_argv", sys.argv)),
        "cwd": os.getcwd(),
        "started_wall_ns": wall_ns,
        "started_ns": monotonic_ns,
        "clock": {"name": "monotonic", "host": host, "wall_offset_ns": wall_ns - monotonic_ns},
        "host": {"name": host, "kernel": platform.release(), "cpu": {"name": None, "cores": os.cpu_count()}},
        "options": {"allocator_iterations": 0, "transfers": False, "memory": True},
        "ranks": [],
        "notes": ["only out-of-memory errors were recorded"],
    }
    with contextlib.suppress(FileExistsError), open(os.path.join(os.path.dirname(spools), "meta.json"), "x") as file:
        json.dump(meta, file)
