"""Limits of the host for this process: memory, cores, and caches.

Affinity, control groups of both versions and CPU quotas count, so that the figures are
right in containers.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Version 1 has a limit of this or more where there is none.
_NO_LIMIT = 1 << 60
# The number of ranks on a host: torchrun, DeepSpeed, Open MPI, MPICH and Intel MPI,
# Slurm (a step's, then a job's).
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)


def meminfo_bytes(key: str, root: Path = Path("/")) -> int | None:
    """Return a figure of the host's memory in bytes.

    An example is `SwapFree`; None where the host does not report it.
    """
    match = re.search(
        rf"^{key}:\s+(\d+) kB", _text(root / "proc/meminfo") or "", re.MULTILINE
    )
    return int(match[1]) * 1024 if match else None


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory in bytes that is left to this process.

    Host and control groups leave it; None where it is not reported.
    """
    total = meminfo_bytes("MemTotal", root)
    limits = [total] if total is not None else []
    limits += [
        int(text)
        for text in _control_group_values(
            root, "memory", "memory.max", "memory.limit_in_bytes"
        )
        if text.isdigit()
    ]
    return min(limits, default=None)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory in bytes that is still available to this process.

    Host and nearest control group have left it; None: not reported.
    """
    available = meminfo_bytes("MemAvailable", root)
    limits = [available] if available is not None else []
    group = memory_group(os.getpid(), root)
    used = None if group is None else group.used_bytes()
    if group is not None and used is not None:
        limits.append(max(group.limit_bytes - used, 0))
    return min(limits, default=None)


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a limit of memory, of version 2 if it is unified."""

    folder: Path
    limit_bytes: int
    is_unified: bool

    def total_bytes(self) -> int | None:
        """Return all memory that counts against the limit.

        Pinned memory and cached files are included.
        """
        text = _text(
            self.folder
            / ("memory.current" if self.is_unified else "memory.usage_in_bytes")
        )
        return int(text) if text and text.isdigit() else None

    def used_bytes(self) -> int | None:
        """Return the memory that counts against the limit, without cached files.

        The kernel drops those first.
        """
        total = self.total_bytes()
        prefix = "" if self.is_unified else "total_"
        statistics = _text(self.folder / "memory.stat") or ""
        cached = re.findall(
            rf"^{prefix}(?:in)?active_file (\d+)$", statistics, re.MULTILINE
        )
        return None if total is None else max(total - sum(map(int, cached)), 0)


def memory_group(pid: int, root: Path = Path("/")) -> MemoryGroup | None:
    """Return the nearest control group above a process that limits its memory.

    Return None where none does.
    """
    for folder, is_unified in _control_groups(root, "memory", str(pid)):
        text = _text(folder / ("memory.max" if is_unified else "memory.limit_in_bytes"))
        if text and text.isdigit() and int(text) < _NO_LIMIT:
            return MemoryGroup(folder, int(text), is_unified)
    return None


def local_ranks() -> int:
    """Return the number of ranks on this host as the launcher of this process states
    it; 1 without a launcher."""
    return stated_local_ranks(os.environ) or 1


def stated_local_ranks(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this host that an environment states.

    A launcher states it; None without a launcher.
    """
    node = environment.get("SLURM_NODEID", "")
    for text in filter(None, map(environment.get, _LOCAL_RANKS)):
        # Slurm lists nodes: 8(x2),4 is 8 on each of the first two and 4 on the third.
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        counts = [int(count) for count, nodes in parts for _ in range(int(nodes or 1))]
        if any(counts):
            return max(
                1, counts[min(int(node) if node.isdigit() else 0, len(counts) - 1)]
            )
    return None


def cores(root: Path = Path("/")) -> int:
    """Return how many logical cores are left to this process, at least 1.

    Affinity and quotas of control groups leave them.
    """
    return within_quotas(len(own_cores()), root)


def own_cores() -> set[int]:
    """Return the logical cores that this process may run on.

    Return all cores where the system has no affinity.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


def rank_cores(ranks: int | None = None, root: Path = Path("/")) -> int:
    """Return how many logical cores each rank on this host may use, at least 1.

    This is a share of the cores of the launcher, the parent of this process, which may
    have bound this rank to fewer of them."""
    own = launcher = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        launcher = max(own, len(os.sched_getaffinity(os.getppid())))
    return max(1, min(own, within_quotas(launcher, root) // (ranks or local_ranks())))


def within_quotas(count: int, root: Path) -> int:
    """Return a number of cores, limited by the quotas of control groups.

    The limit is the number of whole cores in the quotas of the control groups of this
    process.
    """
    quotas = [
        text.split()
        for text in _control_group_values(
            root, "cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us"
        )
    ]
    allowed = [
        math.floor(int(quota) / int(period))
        for quota, period in quotas
        if quota not in ("max", "-1")
    ]
    return max(1, min([count, *allowed]))


def threads_per_core(root: Path = Path("/")) -> int | None:
    """Return how many logical cores a core of this process has.

    Return None where the host does not report it.
    """
    cpu = min(own_cores())
    text = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings")
    return (int(text.replace(",", ""), 16).bit_count() or None) if text else None


def too_few_threads(
    threads: int, possible: int, threads_per_core: int | None = None
) -> bool:
    """Return whether a rank uses at most half of the cores that it may use. Half of the
    logical ones (`possible`) is enough where a core has two, or that is not known:
    torch starts a thread per core."""
    return threads * 2 <= possible - (threads_per_core != 1)


def cache_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of all last-level caches of this process's cores.

    Return None where the host does not report them.
    """
    sizes: dict[tuple[int, str], int] = {}
    folders = (f"sys/devices/system/cpu/cpu{cpu}/cache/index*" for cpu in own_cores())
    for cache in (cache for folder in folders for cache in root.glob(folder)):
        level, size, shared = (
            _text(cache / name) for name in ("level", "size", "shared_cpu_list")
        )
        if level and shared and size and size.endswith("K"):
            sizes[int(level), shared] = int(size[:-1]) * 1024
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or None


def _control_group_values(
    root: Path, controller: str, unified: str, legacy: str
) -> Iterator[str]:
    """Yield the content of a control file in each control group above this process.

    The file is given by its names in version 2 and 1.

    Where a value is spread over several files, their names are separated by a space,
    and so are their contents."""
    for folder, is_unified in _control_groups(root, controller, "self"):
        texts = [
            _text(folder / name) for name in (unified if is_unified else legacy).split()
        ]
        if all(texts):
            yield " ".join(text for text in texts if text)


def _control_groups(
    root: Path, controller: str, process: str
) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each control group above a process, the nearest first.

    Yield also whether it is of version 2.

    Inside a container the group's own path may not be mounted, so the root of the mount
    is among them in any case."""
    for group_line in (_text(root / "proc" / process / "cgroup") or "").splitlines():
        _, names, path = group_line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if names else "")
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield mount / folder, not names


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
