"""Threads of the collector that sample into a spool while the job runs."""

import math
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ebbtide import host_limits
from ebbtide.host_limits import MemoryGroup, memory_group
from ebbtide.numa.topology import pci_node, read_text
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import Spool, process_name
from ebbtide.profiler.sampler.gpu import Gpu, GpuStateReader, open_gpus
from ebbtide.profiler.sampler.links import LinkSource, best_source
from ebbtide.profiler.sampler.numa import NumaReader, describe_nodes
from ebbtide.profiler.sampler.nvml import GpuLost, Nvml, NvmlError
from ebbtide.profiler.sampler.processes import recorded_processes
from ebbtide.units import bytes_text

_HOST_SECONDS = 0.1
_STATE_SECONDS = 0.1
_NUMA_SECONDS = 0.25
_MAX_FAILURES = 10
_DEVICE, _RSS, _SWAP, _CGROUP = (
    kinds.POOLS.index(pool) for pool in ("device", "rss", "swap", "cgroup")
)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# From this share of the limit on there is a warning.
WARNING_SHARE = 0.9


class Sampler:
    """Samples each card and the resident memory of recorded processes.

    Of a card it samples memory, link and state (utilization, power, clocks,
    temperature). Recorded processes have a spool in `directory`. A source that fails
    stops alone. `max_bytes`: limit of the samples' spool; None: none. `root` holds
    `sys` and `proc`. `warn` gets warnings while the job runs, which are notes, too.
    """

    def __init__(
        self,
        directory: Path,
        memory_ms: float = 10.0,
        max_bytes: int | None = None,
        library: Any = None,
        root: Path = Path("/"),
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.notes: list[str] = []
        self._warn = warn
        self._host_limit = HostLimitWatch(root)
        self.host = {**describe_host(), "numa_nodes": describe_nodes(root)}
        self._numa = NumaReader(directory, root)
        self._directory = directory
        self._memory_period_s = memory_ms / 1e3
        self._stop = threading.Event()
        self._spool = Spool(
            str(directory / f"sampler-{process_name(self.host['name'])}.spool"),
            max_bytes,
        )
        self._spool.put_header(0, 0, 0)
        self._nvml: Nvml | None = None
        self._gpus: list[Gpu] = []
        self._state_readers: list[tuple[Gpu, GpuStateReader]] = []
        self._missing_links: list[tuple[Gpu, str]] = []
        try:
            self._nvml = Nvml(library)
            driver = self._nvml.driver()
            opened = open_gpus(self._nvml, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            for gpu in opened.gpus:
                try:
                    description = gpu.describe()
                    node = pci_node(description["pci_bus_id"], root)
                    self.host["gpus"].append(
                        {**description, "driver": driver, "numa_node": node}
                    )
                    self._gpus.append(gpu)
                except NvmlError as error:
                    self.notes.append(f"{gpu.title} is not sampled: {error}")
            self.notes += opened.unavailable
        except NvmlError as error:
            # No fault of a host without a GPU; the trace of a job that uses one names
            # the reason.
            self.host["nvml"] = str(error)
        self._threads: list[threading.Thread] = []
        self._lost: set[int] = set()
        self._lost_lock = threading.Lock()
        self._pids: tuple[int, ...] = ()
        self._next_scan_s = 0.0

    def start(self) -> None:
        self._start_thread("host memory", self._sample_processes, _HOST_SECONDS)
        self._start_thread("NUMA nodes", self._read_numa, _NUMA_SECONDS)
        for gpu in self._gpus:
            self._start_thread(
                "the memory",
                partial(self._sample_memory, gpu),
                self._memory_period_s,
                gpu,
            )
            self._start_link(gpu)
            reader = GpuStateReader(gpu)
            self._state_readers.append((gpu, reader))
            self._start_thread(
                "the state",
                partial(self._sample_state, gpu, reader),
                _STATE_SECONDS,
                gpu,
            )

    def stop(self) -> None:
        """Stop the threads and close the spool and NVML."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2)
        for reason, titles in _by_reason(self._missing_links).items():
            self.notes.append(f"no link use of {titles}: {reason}")
        refusals = [
            (gpu, text)
            for gpu, reader in self._state_readers
            if (text := reader.refusals()) is not None
        ]
        for text, titles in _by_reason(refusals).items():
            self.notes.append(f"not reported by {titles}: {text}")
        # A recording shorter than one period has a sample, too.
        self._next_scan_s = 0.0
        self._sample_processes()
        self._read_numa()
        if self._nvml is not None:
            self._nvml.close()
        if self._spool.full:
            self.notes.append("samples stopped at --max-size")
        elif not self._spool.is_open:
            self.notes.append("samples were cut off: no space left on the device?")
        self._spool.close()

    def _start_link(self, gpu: Gpu) -> None:
        source, reasons = None, list[str]()
        try:
            source, reasons = best_source(gpu)
        except GpuLost as error:
            self._note_loss(gpu, 0.0, error)
            reasons = [str(error)]
        except NvmlError as error:
            reasons = [str(error)]
        description = self.host["gpus"][self._gpus.index(gpu)]
        description["link_source"] = source.name if source else None
        if source is None:
            description["link_missing"] = "; ".join(reasons)
            if gpu.index not in self._lost:
                self._missing_links.append((gpu, description["link_missing"]))
            return
        self._start_thread(
            "the link", partial(self._sample_link, gpu, source), source.period_s, gpu
        )

    def _start_thread(
        self,
        subject: str,
        read: Callable[[], None],
        period_s: float,
        gpu: Gpu | None = None,
    ) -> None:
        """Call `read` once per period on a new thread, until `stop` or a fault that
        does not pass."""
        subject = subject if gpu is None else f"{subject} of {gpu.title}"

        def loop() -> None:
            start_s = due_s = time.monotonic()
            failures = 0
            while (
                not self._stop.wait(max(0.0, due_s - time.monotonic()))
                and self._spool.is_open
            ):
                if self._spool.full:
                    return
                due_s = max(due_s + period_s, time.monotonic() + period_s / 2)
                try:
                    read()
                    failures = 0
                except Exception as error:
                    failures += 1
                    if type(error) is NvmlError and failures < _MAX_FAILURES:
                        continue  # a failure that may pass: only the value is missing
                    elapsed_s = time.monotonic() - start_s
                    if gpu is not None and isinstance(error, GpuLost):
                        self._note_loss(gpu, elapsed_s, error)
                    else:
                        self.notes.append(
                            f"sampling {subject} stopped after {elapsed_s:.1f} s: "
                            f"{error}"
                        )
                    return

        thread = threading.Thread(target=loop, name=f"sampling {subject}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _note_loss(self, gpu: Gpu, elapsed_s: float, error: GpuLost) -> None:
        """Add a note on a card that is lost, once: each of its threads notices it."""
        with self._lost_lock:
            if gpu.index not in self._lost:
                self._lost.add(gpu.index)
                self.notes.append(
                    f"sampling {gpu.title} stopped after {elapsed_s:.1f} s: {error}"
                )

    def _sample_memory(self, gpu: Gpu) -> None:
        used_bytes = gpu.read_used_bytes()
        self._spool.put(
            kinds.MEMORY, _DEVICE, gpu.index, x=time.monotonic_ns(), y=used_bytes
        )

    def _sample_link(self, gpu: Gpu, source: LinkSource) -> None:
        sample = source.read()
        if sample is None:
            return
        link = gpu.read_link()
        self._spool.put(
            kinds.LINK,
            kinds.LINK_SOURCES.index(source.name),
            gpu.index,
            a=link.generation or 0,
            b=link.width or 0,
            w=sample.window_ns,
            x=sample.t_ns,
            y=_rounded(sample.h2d_bytes_per_s),
            z=_rounded(sample.d2h_bytes_per_s),
        )

    def _sample_state(self, gpu: Gpu, reader: GpuStateReader) -> None:
        values = reader.read()
        now_ns = time.monotonic_ns()
        for quantity, value in values.items():
            self._spool.put(
                kinds.GPU_STATE,
                kinds.GPU_QUANTITIES.index(quantity),
                gpu.index,
                x=now_ns,
                y=value,
            )

    def _sample_processes(self) -> None:
        """Read the resident memory of each recorded process.

        Once a second, also read its swap, and which processes are recorded.
        """
        now_s = time.monotonic()
        scan = now_s >= self._next_scan_s
        if scan:
            self._next_scan_s = now_s + (1.0 if self._pids else 0.0)
            self._pids = tuple(recorded_processes(self._directory))
            self._spool.flush()
        for pid in self._pids:
            self._put_host_memory(_RSS, pid, read_rss_bytes(pid))
            if scan:
                self._put_host_memory(_SWAP, pid, read_swap_bytes(pid))
        for pid, used_bytes in self._host_limit.read(self._pids, scan):
            self._put_host_memory(_CGROUP, pid, used_bytes)
        if self._host_limit.description is not None:
            self.host["memory_limit"] = self._host_limit.description
        for warning in self._host_limit.new_warnings():
            self.notes.append(warning)
            self._warn(warning)

    def _read_numa(self) -> None:
        for pid in self._pids:
            self._numa.read(pid)

    def _put_host_memory(self, pool: int, pid: int, size: int | None) -> None:
        if size is not None:
            self._spool.put(
                kinds.MEMORY, pool, kinds.HOST, a=pid, x=time.monotonic_ns(), y=size
            )


def _by_reason(reasons: Iterable[tuple[Gpu, str]]) -> dict[str, str]:
    """Return the titles of the GPUs of each reason, as one text.

    The cards of a host mostly lack the same.
    """
    titles: dict[str, list[str]] = {}
    for gpu, reason in reasons:
        titles.setdefault(reason, []).append(gpu.title)
    return {reason: ", ".join(listed) for reason, listed in titles.items()}


def _rounded(rate: float) -> int:
    return round(rate) if math.isfinite(rate) else kinds.MISSING


def describe_host() -> dict[str, Any]:
    """Return the description of the host for a trace's metadata. Its CPU is the device
    of a job without a GPU."""
    return {
        "name": socket.gethostname(),
        "kernel": platform.release(),
        "cpu": {
            "device": "cpu",
            "kind": "cpu",
            "name": _search("/proc/cpuinfo", r"model name\s*:\s*(.+)")
            or platform.machine(),
            "capacity_bytes": host_limits.memory_bytes(),
            "cores": host_limits.cores(),
            "threads_per_core": host_limits.threads_per_core(),
        },
        "gpus": [],
    }


def read_rss_bytes(pid: int) -> int | None:
    """Return the resident bytes of a process; None if it has ended.

    A process that has ended and is not yet reaped has none.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES or None
    except (OSError, IndexError, ValueError):
        return None


def read_swap_bytes(pid: int) -> int | None:
    """Return the bytes of a process that are in swap.

    Return None if it has ended or the kernel does not report them.
    """
    kib = _search(f"/proc/{pid}/status", r"VmSwap:\s+(\d+) kB")
    return int(kib) * 1024 if kib else None


def _search(path: str, pattern: str) -> str | None:
    match = re.search(pattern, read_text(Path(path)) or "", re.MULTILINE)
    return match.group(1) if match else None


class HostLimitWatch:
    """Watches how much of its limit of host memory a job uses, and warns once per
    control group before the kernel ends the job.

    `root` holds `sys` and `proc`; `description`: the limit for the trace's metadata,
    None before a process with one."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.description: dict[str, Any] | None = None
        self._root = root
        self._groups: dict[int, MemoryGroup | None] = {}
        self._warned: set[Path] = set()
        self._warnings: list[str] = []

    def read(self, pids: Iterable[int], regular: bool) -> Iterator[tuple[int, int]]:
        """Yield (process, bytes in use in its group).

        Unless `regular`, it yields only processes near their limit.
        """
        members: dict[MemoryGroup, list[int]] = {}
        for pid in pids:
            if pid not in self._groups:
                self._groups[pid] = self._find(pid)
            group = self._groups[pid]
            if group is not None:
                members.setdefault(group, []).append(pid)
        for group, group_pids in members.items():
            warning_bytes = WARNING_SHARE * group.limit_bytes
            if not regular and (group.total_bytes() or 0) < warning_bytes:
                continue
            used_bytes = group.used_bytes()
            if used_bytes is None:
                continue
            if used_bytes >= warning_bytes and group.folder not in self._warned:
                self._warned.add(group.folder)
                self._warnings.append(
                    f"host memory is nearly used up: {bytes_text(used_bytes)} of the "
                    f"{bytes_text(group.limit_bytes)} "
                    "that the job's control group may use "
                    f"({used_bytes / group.limit_bytes:.0%}, pinned memory "
                    "included); at the limit the kernel ends the job"
                )
            for pid in group_pids:
                yield pid, used_bytes

    def new_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _find(self, pid: int) -> MemoryGroup | None:
        group = memory_group(pid, self._root)
        if group is not None and self.description is None:
            path = "/" + str(group.folder.relative_to(self._root))
            self.description = {"control_group": path, "bytes": group.limit_bytes}
        return group
