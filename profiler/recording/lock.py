"""The lock of a trace that is being recorded.

The process that will finish the trace holds it.
"""

import fcntl
import json
import os
import time
from pathlib import Path

from ebbtide.profiler.sampler.processes import (
    process_runs,
    recorded_processes,
    start_ticks,
)
from ebbtide.profiler.trace.files import LOCK, is_locked
from ebbtide.profiler.trace.schema import SPOOL

_WAIT_SECONDS = 60.0
_PERIOD_S = 0.02


def lock_recording(path: Path, job: int) -> int:
    """Lock a trace until the descriptor is closed, or this process ends.

    `job`: process id, for the waiting.
    """
    fd = os.open(path / SPOOL / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(
        fd,
        json.dumps(
            {"job": job, "start_ticks": start_ticks(job), "collector": os.getpid()}
        ).encode(),
    )
    return fd


def collector_runs(path: Path) -> bool:
    """Return whether the process that will finish a trace runs, without locking.

    The process is one on this host.
    """
    try:
        return process_runs(
            int(json.loads((path / SPOOL / LOCK).read_bytes())["collector"])
        )
    except (OSError, ValueError, TypeError, KeyError):
        return False


def wait_until_finished(path: Path) -> None:
    """Wait for a recording whose job has ended to be finished.

    Return at once if the job still runs.
    """
    deadline_s = time.monotonic() + _WAIT_SECONDS
    while is_locked(path) and not job_runs(path) and time.monotonic() < deadline_s:
        time.sleep(_PERIOD_S)


def job_runs(path: Path) -> bool:
    """Return whether the job of a trace that is being recorded still runs.

    One of its recorded processes counts, too.
    """
    try:
        lock = json.loads((path / SPOOL / LOCK).read_bytes())
        if (
            lock["start_ticks"] is not None
            and start_ticks(lock["job"]) == lock["start_ticks"]
        ):
            return True
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return any(process_runs(pid) for pid in recorded_processes(path / SPOOL))
