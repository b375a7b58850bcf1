"""Reads which processes of a recording run, and since when."""

from pathlib import Path

from ebbtide.profiler.agent.spool import process_id


def recorded_processes(spools: Path) -> set[int]:
    """Return the ids of the processes that have a spool in the folder `spools`."""
    return {process_id(path.name) for path in spools.glob("agent-*.spool")}


def process_runs(pid: int) -> bool:
    """Return whether a process exists that has not ended."""
    return start_ticks(pid) is not None


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot.

    Return None for one that has ended.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty for a process that
    does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
