"""Limits of the host for this process: memory, cores, and caches.

Affinity, control groups of both versions and CPU quotas count, so that the figures are right in containers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory in bytes that this process may use; None where the host does not report it.

    The least of the host's memory and of the limits of the process's control groups.
    """
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo") or "", re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    limits += [
        int(text)
        for text in _control_group_values(root, "memory", "memory.max", "memory.limit_in_bytes")
        if text.isdigit()
    ]
    return min(limits, default=None)


def cores(root: Path = Path("/")) -> int:
    """Return how many logical cores this process may use, at least 1.

    The least of its CPU affinity and of the whole cores in the quotas of its control groups.
    """
    allowed = [len(os.sched_getaffinity(0))]
    quotas = [
        text.split() for text in _control_group_values(root, "cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us")
    ]
    allowed += [math.floor(int(quota) / int(period)) for quota, period in quotas if quota not in ("max", "-1")]
    return max(1, min(allowed))


def cache_bytes(root: Path = Path("/")) -> int | None:
    """Return the size in bytes of all last-level caches of the host; None where the host does not report them."""
    sizes: dict[tuple[int, str], int] = {}
    for cache in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index*"):
        level, size, shared = (_text(cache / name) for name in ("level", "size", "shared_cpu_list"))
        if level and shared and size and size.endswith("K"):
            sizes[int(level), shared] = int(size[:-1]) * 1024
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or None


def _control_group_values(root: Path, controller: str, unified: str, legacy: str) -> Iterator[str]:
    """Yield the content of a control file in each control group above this process.

    `unified` and `legacy` name the file in version 2 and version 1. Where a value is spread over several files, their
    names are separated by a space, and so are their contents. Inside a container the group's own path may not be
    mounted, so the root of the mount is read in any case.
    """
    for group_line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = group_line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if names else "")
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            texts = [_text(mount / folder / name) for name in (legacy if names else unified).split()]
            if all(texts):
                yield " ".join(text for text in texts if text)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
