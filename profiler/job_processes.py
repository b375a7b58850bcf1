"""Finds the processes of a recorded job that outlive its first one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ebbtide.profiler.agent.options import SPOOL_DIRECTORY
from ebbtide.profiler.agent.spool import process_id
from ebbtide.profiler.processes import process_runs, recorded_processes, start_ticks

# A process that has not imported torch for so long is not expected to train: the server of a logger, for example.
_STARTING_SECONDS = 10.0


def job_continues(spools: Path) -> bool:
    """Return whether a process runs that is recorded, has imported torch, or has begun only just now."""
    with_torch = {process_id(path.name) for path in spools.glob("torch-*")}
    # The environments of all processes of the host are read only where these have ended.
    return any(process_runs(pid) for pid in recorded_processes(spools) | with_torch) or any(
        _age_s(pid) < _STARTING_SECONDS for pid in _with_environment(spools)
    )


def _with_environment(spools: Path) -> list[int]:
    """Return the processes that inherited the environment of the job."""
    entry = f"{SPOOL_DIRECTORY}={spools}".encode()
    pids = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if entry in environment.split(b"\0"):
            pids.append(int(name))
    return pids


def _age_s(pid: int) -> float:
    ticks = start_ticks(pid)
    if ticks is None:
        return float("inf")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
