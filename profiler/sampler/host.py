"""Describes the host, and reads the memory of a job's processes from /proc."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

from ebbtide import host_limits

_PAGE = os.sysconf("SC_PAGE_SIZE")


def describe() -> dict[str, Any]:
    """Return the description of the host for a trace's metadata. Its CPU is the device of a job without a GPU."""
    return {
        "name": socket.gethostname(),
        "kernel": platform.release(),
        "cpu": {
            "device": "cpu",
            "kind": "cpu",
            "name": _cpu_name(),
            "capacity_bytes": host_limits.memory_bytes(),
            "cores": host_limits.cores(),
        },
        "gpus": [],
    }


def rss_bytes(pid: int) -> int | None:
    """Resident bytes of a process, None where it is gone (one that has ended and is not yet reaped has none)."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE or None
    except (OSError, IndexError, ValueError):
        return None


def swap_bytes(pid: int) -> int | None:
    """Bytes of a process that lie in swap, None where it is gone or the kernel does not say."""
    match = _search(f"/proc/{pid}/status", r"VmSwap:\s+(\d+) kB")
    return int(match) * 1024 if match else None


def _cpu_name() -> str:
    return _search("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.machine()


def _search(path: str, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None
