"""Describes the host, and reads the memory of a job's processes from /proc."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

from ebbtide import host_limits

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def describe_host() -> dict[str, Any]:
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


def read_rss_bytes(pid: int) -> int | None:
    """Return the resident bytes of a process; None if it has ended (one that is not yet reaped has none)."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES or None
    except (OSError, IndexError, ValueError):
        return None


def read_swap_bytes(pid: int) -> int | None:
    """Return the bytes of a process that are in swap; None if it has ended or the kernel does not report them."""
    kib = _search(f"/proc/{pid}/status", r"VmSwap:\s+(\d+) kB")
    return int(kib) * 1024 if kib else None


def _cpu_name() -> str:
    return _search("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.machine()


def _search(path: str, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None
