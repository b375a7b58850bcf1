"""Threads of the collector that sample while the job runs, into a spool of their own."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbtide.profiler.agent.spool import HOST, LINK, LINK_SOURCES, MEMORY, MISSING, POOLS, Spool
from ebbtide.profiler.sampler import host
from ebbtide.profiler.sampler.links import LinkSource, best_source
from ebbtide.profiler.sampler.nvml import Gpu, Nvml, NvmlError

_HOST_SECONDS = 0.1
_DEVICE, _RSS, _SWAP = (POOLS.index(pool) for pool in ("device", "rss", "swap"))


class Sampler:
    """Samples from `start` to `stop`: each card's memory and link, and the resident memory of recorded processes.

    directory: of the spools; the processes are those that have one there. memory_ms: between two readings of
    memory. library: stands in for pynvml. A source that fails stops alone, and `notes` say so in one line each.
    """

    def __init__(
        self, directory: Path, memory_ms: float = 10.0, max_bytes: int | None = None, library: Any = None
    ) -> None:
        self.notes: list[str] = []
        self.host = host.describe()
        self._directory = directory
        self._period = memory_ms / 1e3
        self._stop = threading.Event()
        self._spool = Spool(str(directory / f"sampler-{self.host['name']}-{os.getpid()}.spool"), max_bytes)
        self._spool.header(0, 0, 0)
        self._nvml: Nvml | None = None
        self._gpus: list[Gpu] = []
        try:
            self._nvml = Nvml(library)
            driver = self._nvml.driver()
            for gpu in self._nvml.gpus():
                try:
                    self.host["gpus"].append({**gpu.describe(), "driver": driver})
                    self._gpus.append(gpu)
                except NvmlError as error:
                    self.notes.append(f"GPU {gpu.index} is not sampled: {error}")
            self.notes += self._nvml.refused
        except NvmlError as error:
            # A host without a GPU is no fault; one with a driver that will not talk is.
            self.host["nvml"] = str(error)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._run("host memory", self._processes, _HOST_SECONDS)
        for gpu in self._gpus:
            self._run(f"the memory of GPU {gpu.index}", _reader(self._memory, gpu), self._period)
            self._run_link(gpu)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2)
        # Also a recording shorter than one period has a sample.
        self._next_look = 0.0
        self._processes()
        if self._nvml is not None:
            self._nvml.close()
        if self._spool.full:
            self.notes.append("samples stopped at --max-size")
        elif not self._spool.alive:
            self.notes.append("samples were cut off: no space left on the device?")
        self._spool.close()

    def _run_link(self, gpu: Gpu) -> None:
        try:
            source, refused = best_source(gpu)
        except NvmlError as error:
            source, refused = None, [str(error)]
        self.host["gpus"][self._gpus.index(gpu)]["link_source"] = source.name if source else None
        if source is None:
            self.notes.append(f"no link use of GPU {gpu.index}: {'; '.join(refused)}")
            return
        self._run(f"the link of GPU {gpu.index}", _reader(self._link, gpu, source), source.period_s)

    def _run(self, what: str, read: Callable[[], None], period_s: float) -> None:
        """Call `read` every so often on a thread of its own, until `stop` or its first fault."""

        def loop() -> None:
            began = time.monotonic()
            due = began
            failures = 0
            while not self._stop.wait(max(0.0, due - time.monotonic())) and self._spool.alive:
                if self._spool.full:
                    return
                due = max(due + period_s, time.monotonic() + period_s / 2)
                try:
                    read()
                    failures = 0
                except Exception as error:
                    failures += 1
                    if isinstance(error, NvmlError) and type(error) is NvmlError and failures < 10:
                        continue  # a passing refusal: the value is missing, nothing else
                    after = time.monotonic() - began
                    self.notes.append(f"sampling {what} stopped after {after:.1f} s: {error}")
                    return

        thread = threading.Thread(target=loop, name=f"sampling {what}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _memory(self, gpu: Gpu) -> None:
        used = gpu.memory_used()
        self._spool.put(MEMORY, _DEVICE, gpu.index, x=time.monotonic_ns(), y=used)

    def _link(self, gpu: Gpu, source: LinkSource) -> None:
        sample = source.read()
        if sample is None:
            return
        link = gpu.link()
        self._spool.put(
            LINK,
            LINK_SOURCES.index(source.name),
            gpu.index,
            a=link.generation or 0,
            b=link.width or 0,
            w=sample.window_ns,
            x=sample.t_ns,
            y=_whole(sample.h2d_bytes_per_s),
            z=_whole(sample.d2h_bytes_per_s),
        )

    _next_look = 0.0
    _pids: tuple[int, ...] = ()

    def _processes(self) -> None:
        """Resident memory of each recorded process; once in a while also its swap, and who is recorded."""
        now = time.monotonic()
        look = now >= self._next_look
        if look:
            self._next_look = now + (1.0 if self._pids else 0.0)
            names = [path.stem for path in self._directory.glob("agent-*.spool")]
            self._pids = tuple(int(name.rpartition("-")[2]) for name in names)
            self._spool.flush()
        for pid in self._pids:
            self._put_host(_RSS, pid, host.rss_bytes(pid))
            if look:
                self._put_host(_SWAP, pid, host.swap_bytes(pid))

    def _put_host(self, pool: int, pid: int, size: int | None) -> None:
        if size is not None:
            self._spool.put(MEMORY, pool, HOST, a=pid, x=time.monotonic_ns(), y=size)


def _whole(rate: float) -> int:
    return round(rate) if math.isfinite(rate) else MISSING


def _reader(read: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: read(*arguments)
