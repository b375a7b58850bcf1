"""A fake of the functions of torch.cuda that CudaDevice calls, on host memory, with a
scripted allocator.

It runs CudaDevice's own code, and checks that streams and events order all accesses
(happens_before.py). It says nothing about CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.interleave.engine.devices.cuda import CudaDevice
from ebbtide.interleave.engine.devices.device import Direction, Mark
from ebbtide.interleave.engine.devices.device import Stream as StreamName
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from tests.interleave.engine.devices.happens_before import HOST, Clock, Order
from tests.interleave.engine.twins import WatchedKernel

KERNEL = "ebbtide.interleave.engine.numerics.triton_kernel"
_current = threading.local()
# The device of the engine. Threads begin with device 0 as the current one.
DEVICE = 1
RELAXED = 2


@dataclass
class FakeCuda:
    """The state of the fake.

    Attributes:
        total_bytes: Memory of the device.
        others_bytes: Memory of other processes and the CUDA context.
        reserved_bytes: Memory that torch has reserved.
        frees: How often torch has returned memory to the device.
        capturing: Whether the current stream is captured.
        register_error: The result of cudaHostRegister.
        registered: Bytes of pinned memory, by address.
        compile_error: The error that every launch of the update raises.
        strays: The threads that have called functions of events with another current
            device.
        strict_threads: The threads that have called them in a capture mode in which
            they end captures of others.
        shares_queue: Whether a stream waits for earlier work of all others, as with
            CUDA_DEVICE_MAX_CONNECTIONS=1.
        clock_rate: The rate of the device's clock, by that of the host's.
        order: The order of all accesses.
        pause: Called before the host waits for an event.
        streams: The number of streams made so far.
        dropped_wait: The number of the wait of a stream to leave out; None to leave out
            none.
        waits: The number of waits so far.
        left_out: The clocks of the wait that was left out, and the thread.
        careless: Streams for which the host does not wait.
    """

    total_bytes: int = 80 << 30
    others_bytes: int = 1 << 30
    reserved_bytes: int = 0
    frees: int = 0
    capturing: bool = False
    register_error: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    compile_error: Exception | None = None
    strays: set[str] = field(default_factory=set)
    strict_threads: set[str] = field(default_factory=set)
    shares_queue: bool = False
    clock_rate: float = 1.0
    order: Order = field(default_factory=Order)
    pause: Callable[[], None] = lambda: None
    streams: int = 0
    dropped_wait: int | None = None
    waits: int = 0
    left_out: tuple[list[Clock], int] | None = None
    careless: set[str] = field(default_factory=set)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return (
            self.total_bytes - self.others_bytes - self.reserved_bytes,
            self.total_bytes,
        )

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {
            "reserved_bytes.all.current": self.reserved_bytes,
            "num_device_free": self.frees,
        }

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if not self.register_error:
            self.registered[pointer] = nbytes
        return self.register_error

    def cudaHostUnregister(self, pointer: int) -> int:
        self.order.access_range(
            "release of pinned memory", HOST, pointer, self.registered.pop(pointer)
        )
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        value = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        value[0], _current.mode = capture_mode(), value[0]
        return 0

    def call_event(self) -> None:
        """Note a thread that calls a function of events in a state in which it should
        not."""
        name = threading.current_thread().name
        if current_device() != DEVICE:
            self.strays.add(name)
        if capture_mode() != RELAXED:
            self.strict_threads.add(name)

    def make_stream(self) -> Stream:
        self.streams += 1
        return Stream(self, f"stream {self.streams}")

    def current_stream(self, device: object = None) -> Stream:
        return getattr(_current, "stream", None) or self.job

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = getattr(_current, "stream", None)
        _current.stream = stream
        try:
            yield
        finally:
            _current.stream = before

    def __post_init__(self) -> None:
        self.job = Stream(self, "job")


def capture_mode() -> int:
    """Return the capture mode of the calling thread."""
    return getattr(_current, "mode", 0)


def current_device() -> int:
    return getattr(_current, "device", 0)


@contextlib.contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Return a context with another current device; CheckedDevice names that of the
    engine `cpu`."""
    before = current_device()
    _current.device = DEVICE if device.type == "cpu" else device.index
    try:
        yield
    finally:
        _current.device = before


class Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_event(self, event: Event) -> None:
        self.cuda.order.wait(self.name, event.clock)


class Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.clock: Clock = {}
        self._stream = ""
        self._time_s = 0.0

    def record(self, stream: Stream) -> None:
        order = self._cuda.order
        if self._cuda.shares_queue:
            for number in range(self._cuda.streams):
                order.wait(stream.name, order.clock(f"stream {number + 1}"))
            order.wait(stream.name, order.clock("job"))
        self.clock, self._stream = order.reached(stream.name), stream.name
        self._time_s = time.perf_counter()

    def synchronize(self) -> None:
        self._cuda.call_event()
        self._cuda.pause()
        if self._stream not in self._cuda.careless:
            self._cuda.order.wait(HOST, self.clock)

    def query(self) -> bool:
        self._cuda.call_event()
        # The host does not know whether the work is done, unless it has waited.
        return self._cuda.order.knows(HOST, self.clock)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later._time_s - self._time_s) * self._cuda.clock_rate


class CheckedKernel(WatchedKernel):
    """Updates on the CPU that record what they read and write."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(
            lambda reads, writes: cuda.order.access(
                "update on the CPU", HOST, reads, writes
            )
        )


class CheckedDevice(CudaDevice):
    """A CudaDevice whose memory is host memory, and which records what it reads and
    writes."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(torch.device("cuda", DEVICE))
        self._device = torch.device("cpu")
        self._cuda = cuda
        # Memory is not used for anything else after its release.
        self._memory: list[torch.Tensor] = []

    def wait(self, stream: StreamName, marks: Sequence[Mark]) -> None:
        self._cuda.waits += 1
        if self._cuda.dropped_wait == self._cuda.waits - 1:
            clocks = [mark.event.clock for mark in marks]  # type: ignore[attr-defined]
            self._cuda.left_out = clocks, threading.get_ident()
        else:
            super().wait(stream, marks)

    def stream_name(self, stream: StreamName) -> str:
        """Return the name of a stream in the order."""
        return str(self.stream(stream).name)  # type: ignore[attr-defined]

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        if threading.current_thread().name.startswith("ebbtide-"):
            # What the engine's own threads call besides, as for memory, must not depend
            # on where it is called.
            self._cuda.call_event()
        stream = self.stream_name(direction)
        for source, target in pairs:
            self._cuda.order.access(f"copy {direction}", stream, [source], [target])
        super().copy(direction, pairs)

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        tensor = super().allocate_state(params, rows)
        self._memory.append(tensor)
        self._write("allocation", tensor)
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        super().release(tensor)
        self._write("release", tensor)
        tensor.fill_(float("nan"))

    def _write(self, what: str, tensor: torch.Tensor) -> None:
        """Record what other owners of the memory do with it, before or after."""
        self._cuda.order.access(what, self.stream_name("memory"), [], [tensor])


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace the functions of torch.cuda, and the kernels, which then run on the
    CPU."""
    fake, kernel = FakeCuda(), CpuKernel(1)

    def update(updates: Sequence[TensorUpdate]) -> None:
        if fake.compile_error is not None:
            raise fake.compile_error
        for own in updates:
            fake.order.access(
                "update", fake.current_stream().name, [own.grad], [*own.state, own.out]
            )
            kernel.update(own.grad, own.state, own.out, own.scalars, rule=own.rule)

    def deferred(call: Callable[..., Any]) -> Callable[..., Any]:
        def start(tensors: Sequence[torch.Tensor]) -> Callable[[], list[Any]]:
            results = [call(tensor) for tensor in tensors]
            return lambda: (fake.call_event(), results)[1]

        return start

    def warm_up(*_: object) -> None:
        if fake.compile_error is not None:
            raise fake.compile_error

    kernels = types.ModuleType(KERNEL)
    vars(kernels).update(
        gpu_update=update,
        gpu_sums_of_squares=deferred(kernel.sum_of_squares),
        gpu_fingerprint=deferred(kernel.fingerprint),
        warm_up=warm_up,
    )
    monkeypatch.setitem(sys.modules, KERNEL, kernels)
    monkeypatch.setattr(
        "ebbtide.interleave.engine.numerics.triton_kernel", kernels, raising=False
    )
    for name, replacement in {
        "current_device": current_device,
        "device": use_device,
        "stream": fake.stream,
        "Stream": fake.make_stream,
        "current_stream": fake.current_stream,
        "Event": lambda enable_timing, blocking: Event(fake),
        "mem_get_info": fake.mem_get_info,
        "memory_stats": fake.memory_stats,
        "memory_reserved": lambda device: fake.reserved_bytes,
        "is_current_stream_capturing": lambda: fake.capturing,
        "cudart": lambda: fake,
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr("ebbtide.interleave.engine.devices.cuda._driver", lambda: fake)
    monkeypatch.setattr(
        "ebbtide.interleave.engine.devices.cuda._take_stream",
        lambda device: torch.cuda.Stream(),
    )
    monkeypatch.setattr(
        "ebbtide.interleave.engine.devices.cuda._free_streams", defaultdict(list)
    )
    monkeypatch.setattr(
        "ebbtide.interleave.engine.devices.cuda.gpu_node", lambda device: None
    )
    monkeypatch.setattr(CudaDevice, "close", lambda device: kernel.close())
    return fake


def open_fake(cuda: FakeCuda) -> CheckedDevice:
    """Return a CudaDevice whose memory is host memory."""
    return CheckedDevice(cuda)


def job_tensor(
    cuda: FakeCuda, values: torch.Tensor, kept: list[np.ndarray]
) -> torch.Tensor:
    """Return a copy of values that the job's stream writes.

    When nobody refers to it any more, the job's stream may write other things to its
    memory; `kept` keeps it."""
    bits = values.reshape(-1).view(torch.uint8).numpy().copy()
    kept.append(bits)
    view = bits[:]
    begin = view.ctypes.data
    weakref.finalize(
        view, cuda.order.access_range, "use of freed memory", "job", begin, view.nbytes
    )
    cuda.order.access_range("backward", "job", begin, view.nbytes)
    return torch.from_numpy(view).view(values.dtype)
