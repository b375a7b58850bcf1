"""Finds the processes of a recorded job that outlive its first one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ebbtide.profiler.agent.options import SPOOL_DIRECTORY
from ebbtide.profiler.agent.spool import process_id
from ebbtide.profiler.trace.lock import process_runs, start_ticks

# A process that has not imported torch for so long is not expected to train: the server of a logger, for example.
_STARTING_SECONDS = 10.0


def remaining_processes(spools: Path) -> list[int]:
    """Return the ids of running processes that are recorded, have imported torch, or have begun only just now.

    Args:
        spools: The folder of the spools, which the environment of each process of the job names.
    """
    recorded = {process_id(path.name) for path in spools.glob("agent-*.spool")}
    with_torch = {int(path.name.rpartition("-")[2]) for path in spools.glob("torch-*")}
    expected = {pid for pid in recorded | with_torch if process_runs(pid)}
    return sorted(expected | {pid for pid in _with_environment(spools) if _age_s(pid) < _STARTING_SECONDS})


def _with_environment(spools: Path) -> list[int]:
    """Return the running processes that inherited the environment of the job."""
    entry = f"{SPOOL_DIRECTORY}={spools}".encode()
    pids = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if entry in environment.split(b"\0") and process_runs(int(name)):
            pids.append(int(name))
    return pids


def _age_s(pid: int) -> float:
    ticks = start_ticks(pid)
    if ticks is None:
        return float("inf")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
