"""Checks of host memory: limits, pages, pinning, shared memory, swap."""

import os
import re
import resource
from collections.abc import Iterator

from ebbtide import host_limits
from ebbtide.features.doctor.check import Answer, check
from ebbtide.features.doctor.host import JobHost
from ebbtide.state_bytes import STATE_BYTES
from ebbtide.units import bytes_text

_MIN_SHARE = 0.5
_MIN_AVAILABLE_SHARE = 0.1
_MIN_SWAPPED_BYTES = 1 << 30
# Registered memory of libaio and io_uring, of RDMA, and of some drivers counts against
# the limit.
_MIN_MEMLOCK_BYTES = 8 << 20  # the default of Linux since 5.16; it was 64 KiB
# Docker's default is 64 MiB; NCCL asks for 1 GiB.
_MIN_SHARED_BYTES = 1 << 30


@check("memory")
def memory(host: JobHost) -> Iterator[Answer]:
    """Compare the memory that the job may use with the host's memory."""
    total, limit = (
        host_limits.meminfo_bytes("MemTotal", host.root),
        host_limits.memory_bytes(host.root),
    )
    available = host_limits.available_bytes(host.root)
    if total is None or limit is None or available is None:
        yield "unknown", "the host does not report its memory"
        return
    each = available // host.ranks
    parameters = f"{each / STATE_BYTES / 1e9:.1f} G parameters"
    text = (
        f"{bytes_text(available)} free of {bytes_text(limit)}: state of {parameters} a "
        "rank"
    )
    if available < _MIN_AVAILABLE_SHARE * limit:
        yield (
            "warning",
            f"{text}; other processes hold the rest",
            "end them, or let the job use less host memory",
        )
    elif limit < _MIN_SHARE * total:
        remedy = (
            "docker run --memory SIZE, --mem SIZE of Slurm, limits.memory of Kubernetes"
        )
        yield (
            "warning",
            f"{text}; the control group has {bytes_text(limit)} of the host's "
            f"{bytes_text(total)}",
            remedy,
        )
    else:
        yield "ok", text


@check("swap")
def swap(host: JobHost) -> Iterator[Answer]:
    """Check whether the host swaps: state in swap is read from disk in every update."""
    total, free = (
        host_limits.meminfo_bytes("SwapTotal", host.root),
        host_limits.meminfo_bytes("SwapFree", host.root),
    )
    if total is None or free is None:
        yield "unknown", "the host does not report its swap"
    elif total - free >= _MIN_SWAPPED_BYTES:
        text = (
            f"{bytes_text(total - free)} of memory are in swap: state there is read "
            "from disk in every update"
        )
        yield (
            "warning",
            text,
            "free memory, then `swapoff -a && swapon -a`, or set vm.swappiness=1",
        )
    else:
        yield "ok", f"{bytes_text(total - free)} in use of {bytes_text(total)}"


@check("huge-pages")
def huge_pages(host: JobHost) -> Iterator[Answer]:
    """Check whether pinned memory gets huge pages.

    The engine asks for them.
    """
    chosen = re.search(
        r"\[(\w+)\]", host.text("sys/kernel/mm/transparent_hugepage/enabled")
    )
    if chosen is None:
        yield "unknown", "the kernel does not report transparent huge pages"
    elif chosen[1] == "never":
        yield (
            "warning",
            "transparent huge pages are off: pinning takes 512 times as many pages "
            "(memory was taken at 0.4 instead of "
            "2.3 GB/s on one host)",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    else:
        yield "ok", f"transparent huge pages: {chosen[1]}"


@check("locked-memory")
def locked_memory(host: JobHost) -> Iterator[Answer]:
    """Check the limit of locked memory, which child processes inherit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield "ok", "no limit"
    elif limit < _MIN_MEMLOCK_BYTES:
        yield (
            "warning",
            f"a process may lock {limit >> 10} KiB: asynchronous reads and writes of "
            "storage, RDMA and some drivers "
            "fail to register more",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, "
            "LimitMEMLOCK=infinity of systemd",
        )
    else:
        yield "ok", f"a process may lock {bytes_text(limit)}"


@check("shared-memory")
def shared_memory(host: JobHost) -> Iterator[Answer]:
    """Check the size of /dev/shm.

    Workers of a DataLoader pass batches through it, and NCCL data of ranks.
    """
    try:
        space = os.statvfs(host.root / "dev/shm")
    except OSError:
        yield "unknown", "no /dev/shm can be seen"
        return
    size = space.f_blocks * space.f_frsize
    if size < _MIN_SHARED_BYTES:
        text = (
            f"/dev/shm has {bytes_text(size)}: workers of a DataLoader end with a bus "
            "error, NCCL cannot start"
        )
        yield (
            "warning",
            text,
            "docker run --shm-size 16g, or --ipc=host; an emptyDir of medium Memory "
            "in Kubernetes",
        )
    else:
        yield "ok", f"/dev/shm has {bytes_text(size)}"


@check("pinned-memory")
def pinned_memory(host: JobHost) -> Iterator[Answer]:
    """Check for WSL2, whose driver pins half of the memory at most."""
    if "microsoft" not in host.text("proc/version").lower():
        yield "ok", "the driver sets no limit of its own"
        return
    total = host_limits.meminfo_bytes("MemTotal", host.root) or 0
    yield (
        "warning",
        f"WSL2 pins at most about half of its memory, {bytes_text(total / 2)} here: "
        "offloaded state above it cannot be "
        "allocated",
        "give WSL2 more memory (memory=SIZE in .wslconfig), or start Linux itself",
    )
