"""What this process may use of the host, and how fast its memory is."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import timed

_LEAST_WORKING_SET = 256 << 20
# More than four times what most hosts have; taken where a host does not tell its caches.
_BLIND_WORKING_SET = 1 << 30


def memory_bytes(root: Path = Path("/")) -> int | None:
    """The memory this process may use: the host's, or the least that its control groups (either version) allow."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo") or "", re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    limits += [
        int(text) for text in _of_groups(root, "memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()
    ]
    return min(limits, default=None)


def cores(root: Path = Path("/")) -> int:
    """The logical cores this process may use: its affinity, or the whole cores of its control groups' quotas."""
    allowed = [len(os.sched_getaffinity(0))]
    quotas = [text.split() for text in _of_groups(root, "cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us")]
    allowed += [math.floor(int(quota) / int(period)) for quota, period in quotas if quota not in ("max", "-1")]
    return max(1, min(allowed))


def cache_bytes(root: Path = Path("/")) -> int | None:
    """The last-level caches of the host together; None where it does not tell."""
    found: dict[tuple[int, str], int] = {}
    for cache in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index*"):
        level, size, shared = (_text(cache / name) for name in ("level", "size", "shared_cpu_list"))
        if level and shared and size and size.endswith("K"):
            found[int(level), shared] = int(size[:-1]) * 1024
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or None


def working_set(memory: int | None, cache: int | None) -> int:
    """Bytes to measure over: four times the caches, so that they hold little of it, and at most an eighth of a rank's
    memory."""
    wanted = max(_LEAST_WORKING_SET, 4 * cache) if cache is not None else _BLIND_WORKING_SET
    return min(wanted, memory // 8) if memory else wanted


def bandwidth(setup: Setup, record: Record) -> None:
    """host_memory_bytes_per_s: bytes read plus bytes written a second, with all threads of the job, the better of two
    ways. Write-allocate traffic (a line read only because it is about to be written) is not counted."""
    torch.set_num_threads(setup.threads)
    count = setup.working_set // 8
    one, other = torch.ones(count), torch.ones(count)
    size = 4 * count
    copy = timed(lambda: one.copy_(other), setup.window_s, setup.ranks)
    # In place, so that what is written has been read anyway: of all loops the likest to an update.
    add = timed(lambda: one.add_(other, alpha=0.5), setup.window_s, setup.ranks)
    threads = f"torch, threads: {setup.threads}, {size >> 20} MiB an array"
    record.host_traffic(2 * size / copy.seconds, f"copy ({threads})", copy)
    record.host_traffic(3 * size / add.seconds, f"in-place a += b / 2 ({threads})", add)


def _of_groups(root: Path, controller: str, unified: str, legacy: str) -> Iterator[str]:
    """What each control group above this process says; of several files (named with a space between), their texts
    joined by one. Inside a container the group's own path may not be mounted: its root is looked at in any case."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
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
