"""The clock of a dry run: times of the host and of the GPU's queues, under fast,
typical and slow assumptions."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from ebbtide.machines.kernels import time_priors as priors
from ebbtide.machines.kernels.efficiency import PRODUCT
from ebbtide.machines.kernels.rates import GpuRates, KernelWork
from ebbtide.machines.kernels.time_priors import (
    CASES,
    MAX_QUEUED,
    TYPICAL,
    PriorRange,
    WorkClass,
)
from ebbtide.machines.machine import Machine

# Streams of the collectives of NCCL, which are not those of the job.
COMMUNICATION_STREAM = 1_000
# Numbers of streams that a device has: that of its default stream is a multiple.
DEVICE_STREAMS = 1_000_000
_PEER_COPY = "Memcpy PtoP"
Times = tuple[int, ...]  # one in each of the cases


class SimulatedTime:
    """A host that launches work asynchronously, and a GPU that runs each stream in
    order."""

    def __init__(self) -> None:
        self.host_ns = 0
        self._streams: dict[int, int] = {}
        self._engines: dict[str, int] = {}
        self._queued: deque[int] = deque(maxlen=MAX_QUEUED)

    def launch(
        self, stream: int, latency_ns: int, duration_ns: int, engine: str | None = None
    ) -> tuple[int, int]:
        """Append work to a stream, and return its start and end.

        `engine`: the resource that does one piece of work at a time, of all streams;
        None: one of the stream's own."""
        if len(self._queued) == MAX_QUEUED:
            self.host_ns = max(self.host_ns, self._queued[0])
        start = max(self.host_ns + latency_ns, self._streams.get(stream, 0))
        if engine is not None:
            start = max(start, self._engines.get(engine, 0))
        end = start + duration_ns
        self._streams[stream] = end
        if engine is not None:
            self._engines[engine] = end
        self._queued.append(end)
        return start, end

    def reached_ns(self, stream: int) -> int:
        """Return when the GPU passes what is recorded on a stream now, as an event."""
        return max(self.host_ns, self._streams.get(stream, 0))

    def wait(self, stream: int, until_ns: int) -> None:
        self._streams[stream] = max(self._streams.get(stream, 0), until_ns)

    def synchronize(self, stream: int | None = None) -> None:
        """Make the host wait for a stream, or for all of them."""
        ends = (
            self._streams.values()
            if stream is None
            else (self._streams.get(stream, 0),)
        )
        self.host_ns = max(self.host_ns, *ends, 0)


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A kernel: its work, its stream, its times in ns in the typical case, and the
    number of its device."""

    work: KernelWork
    stream: int
    launch_ns: int
    start_ns: int
    end_ns: int
    device: int = 0


@dataclass(frozen=True, slots=True)
class LaunchedCopy:
    """A copy: its direction (`h2d`, `d2h`), bytes and `host_memory` (`pinned` or
    `pageable`), its stream, times and device."""

    direction: str
    size: int
    host_memory: str
    stream: int
    launch_ns: int
    start_ns: int
    end_ns: int
    device: int = 0


class VirtualClock:
    """A clock that stands still between operations.

    Three simulations advance side by side, one for each of `CASES`. The trace has the
    typical one.

    Attributes:
        kernels, copies: Those so far, in order of launch.
        device: The number of the current device.
        stream: The current stream of that device; 0 is the default one of the first.
        in_job: Whether a phase has begun: before, work on the host takes no time.
        closed: Whether the job is at its end: nothing is counted from then on, here and
            by all that has this clock.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self.rates = GpuRates(machine)
        self._kernel_ns = cache(self.rates.kernel_ns)
        self.kernels: list[LaunchedKernel] = []
        self.copies: list[LaunchedCopy] = []
        self.device = 0
        # Device -> its current stream, where that is not the default one.
        self._current: dict[int, int] = {}
        self.in_job = self.closed = False
        self._cases = tuple(SimulatedTime() for _ in CASES)
        self._typical = self._cases[TYPICAL]
        self._machine_name = machine.name if machine is not None else None
        pinned = machine and {
            "h2d": machine.h2d_bytes_per_s,
            "d2h": machine.d2h_bytes_per_s,
        }
        pageable = machine and {
            "h2d": machine.h2d_pageable_bytes_per_s,
            "d2h": machine.d2h_pageable_bytes_per_s,
        }
        self._pinned = {
            key: (pinned and pinned[key]) or priors.PINNED_BYTES_PER_S
            for key in ("h2d", "d2h")
        }
        self._pageable = {
            key: (pageable and pageable[key])
            or priors.PAGEABLE_SHARE * self._pinned[key]
            for key in ("h2d", "d2h")
        }

    @property
    def stream(self) -> int:
        return self.stream_of(self.device)

    @stream.setter
    def stream(self, stream: int) -> None:
        self._current[stream // DEVICE_STREAMS] = stream

    def stream_of(self, device: int) -> int:
        """Return the current stream of a device."""
        return self._current.get(device, device * DEVICE_STREAMS)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device the current one for a while."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    @property
    def now_ns(self) -> int:
        """The time of the host since the start of the job, in the typical case."""
        return self._typical.host_ns

    def tick(self) -> int:
        """Advance the host by 1 ns, so that events keep their order, and return the
        time."""
        for case in self._cases:
            case.host_ns += 1
        return self._typical.host_ns

    def run_host(self, times_ns: PriorRange | list[int]) -> None:
        """Advance the host by a time in each case."""
        for case, time_ns in zip(self._cases, times_ns, strict=True):
            case.host_ns += round(time_ns)

    def run_kernel(self, work: KernelWork, stream: int | None = None) -> None:
        """Launch a kernel on a stream; None: the current one."""
        stream = self.stream if stream is None else stream
        launch_ns = self.tick()
        times = [
            case.launch(stream, round(latency), duration)
            for case, latency, duration in zip(
                self._cases, priors.LAUNCH_NS, self._kernel_ns(work), strict=True
            )
        ]
        if not self.closed:
            self.kernels.append(
                LaunchedKernel(
                    work, stream, launch_ns, *times[TYPICAL], device=self.device
                )
            )

    def run_collective(
        self,
        work: KernelWork,
        is_async: bool = False,
        stream: int = COMMUNICATION_STREAM,
    ) -> Times:
        """Launch a collective after the work of the current stream, and return its end
        in each case.

        `is_async`: whether the current stream goes on without waiting for it."""
        self.wait(self.record(), stream)
        self.run_kernel(work, stream)
        done = self.record(stream)
        if not is_async:
            self.wait(done)
        return done

    def run_copy(
        self, direction: str, size: int, pinned: bool = False, blocking: bool = True
    ) -> None:
        """Copy `size` bytes between host and device on the current stream.

        A blocking copy makes the host wait for the stream, as `Tensor.to` does. One
        that is not makes it wait for nothing if the host's memory is pinned, else while
        the data pass a pinned buffer of the driver.

        Args:
            direction: `h2d` or `d2h`.
            pinned: Whether the memory of the host is pinned.
        """
        if self.closed or not size:
            return
        rate = (self._pinned if pinned else self._pageable)[direction]
        launch_ns = self.tick()
        times = []
        for number, case in enumerate(self._cases):
            duration = round(
                1e9 * size / (rate * priors.COPY_EFFICIENCY[number])
                + priors.COPY_NS[number]
            )
            times.append(
                case.launch(
                    self.stream,
                    round(priors.LAUNCH_NS[number]),
                    duration,
                    f"{direction} {self.device}",
                )
            )
            if blocking or (not pinned and direction == "d2h"):
                case.synchronize(self.stream)
            elif not pinned:
                case.host_ns += duration
        host_memory = "pinned" if pinned else "pageable"
        self.copies.append(
            LaunchedCopy(
                direction,
                size,
                host_memory,
                self.stream,
                launch_ns,
                *times[TYPICAL],
                device=self.device,
            )
        )

    def run_peer_copy(self, source: int, target: int, size: int) -> None:
        """Copy `size` bytes from one device to another, over the link between them: the
        current streams of both wait for each other."""
        rate = self.rates.peer_bytes_per_s
        streams = self.stream_of(source), self.stream_of(target)
        launch_ns = self.tick()
        times = []
        for number, case in enumerate(self._cases):
            duration = round(
                1e9 * size / (rate * priors.COPY_EFFICIENCY[number])
                + priors.COPY_NS[number]
            )
            case.wait(streams[0], case.reached_ns(streams[1]))
            latency = round(priors.LAUNCH_NS[number])
            times.append(case.launch(streams[0], latency, duration, f"from {source}"))
            case.wait(streams[1], times[-1][1])
        if not self.closed:
            work = KernelWork(_PEER_COPY, "copy", WorkClass.ELEMENTWISE, 0.0, size)
            row = LaunchedKernel(work, streams[0], launch_ns, *times[TYPICAL], source)
            self.kernels.append(row)

    def record(self, stream: int | None = None) -> Times:
        """Return when the GPU passes an event that is recorded now on a stream, in each
        case; None: the current one."""
        stream = self.stream if stream is None else stream
        return tuple(case.reached_ns(stream) for case in self._cases)

    def wait(self, event: Times, stream: int | None = None) -> None:
        """Make a stream wait for an event; None: the current one."""
        for case, until_ns in zip(self._cases, event, strict=True):
            case.wait(self.stream if stream is None else stream, until_ns)

    def synchronize(self, stream: int | None = None) -> None:
        """Make the host wait for a stream; None: for all."""
        for case in self._cases:
            case.synchronize(stream)

    def synchronize_event(self, event: Times) -> None:
        """Make the host wait for an event."""
        for case, until_ns in zip(self._cases, event, strict=True):
            case.host_ns = max(case.host_ns, until_ns)

    def assumptions(self) -> dict[str, str]:
        """Return what the times rest on, in words."""
        rates = [
            (key, self._pinned[key] / 1e9, self._pageable[key] / 1e9)
            for key in self._pinned
        ]
        link = ", ".join(
            f"{pinned:.1f} GB/s {key} ({pageable:.1f} pageable)"
            for key, pinned, pageable in rates
        )
        matrix, python = self.rates.share(PRODUCT).cases(), priors.PYTHON_OPERATION_NS
        memory, engine = (
            priors.MEMORY_EFFICIENCY[priors.WorkClass.ELEMENTWISE],
            priors.ENGINE_OPERATION_NS,
        )
        return {
            "gpu": self.rates.description,
            "link": link,
            "efficiency": (
                f"large matrix products in half precision reach {_percents(matrix)} of "
                "the peak, "
                f"element-wise operations {_percents(memory)} of the rate of memory "
                "(fast, typical, slow)"
            ),
            "host": (
                f"{_microseconds(python)} us per operation from Python, "
                f"{_microseconds(engine)} us in the backward"
            ),
        }


def _percents(prior: PriorRange) -> str:
    return " / ".join(f"{100 * value:.0f}" for value in prior) + " %"


def _microseconds(prior: PriorRange) -> str:
    return " / ".join(f"{value / 1e3:g}" for value in prior)
