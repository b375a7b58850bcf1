"""A CUDA GPU as device of the engine."""

import ctypes
import functools
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from ebbtide.interleave.engine.devices.device import Device, Direction, Mark, Stream
from ebbtide.interleave.engine.devices.host_memory import allocate_pinned, gpu_node
from ebbtide.interleave.engine.errors import (
    DeviceMemoryError,
    EngineError,
    UpdateNotStarted,
)
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import UpdateRule
from ebbtide.profiler.agent.cuda_streams import own_stream

log = logging.getLogger("ebbtide")

# cudaStreamCaptureModeRelaxed: https://docs.nvidia.com/cuda/cuda-driver-api
# (cuThreadExchangeStreamCaptureMode).
_RELAXED = 2


# Streams of engines that are gone, which the next ones use: their number does not grow.
_free_streams: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that neither the job nor another engine has."""
    free = _free_streams[device]
    if free:
        return free.pop()
    stream: torch.cuda.Stream = own_stream(torch, torch.cuda.current_device())
    return stream


@contextmanager
def thread_setup(device: torch.device) -> Iterator[None]:
    """Return a context in which the calling thread may use a GPU.

    See `Streams.thread_setup`.
    """
    with torch.cuda.device(device), _relaxed_captures():
        yield


class CudaAnchor:
    """A passed event, and when on the clock of time.perf_counter. Times of later events
    are counted from it."""

    def __init__(self, event: torch.cuda.Event, time_s: float) -> None:
        self._event = event
        self._time_s = time_s

    def time_s(self, event: torch.cuda.Event) -> float:
        """Return the time of an event that was passed, in seconds."""
        elapsed_s = float(self._event.elapsed_time(event)) / 1e3
        # The clocks of host and device drift apart, but the event is over now.
        self._time_s = min(self._time_s, time.perf_counter() - elapsed_s)
        return self._time_s + elapsed_s


class CudaMark:
    """An event that was recorded on a stream of a GPU, after an anchor."""

    def __init__(
        self, device: torch.device, event: torch.cuda.Event, anchor: CudaAnchor
    ) -> None:
        self.event = event
        self._device = device
        self._anchor = anchor

    @property
    def is_passed(self) -> bool:
        with thread_setup(self._device):
            return bool(self.event.query())

    def synchronize(self) -> None:
        with thread_setup(self._device):
            self.event.synchronize()

    @property
    def time_s(self) -> float:
        """When the stream passed it, on the clock of time.perf_counter."""
        with thread_setup(self._device):
            return self._anchor.time_s(self.event)


class CudaStreams:
    """The streams for copies and updates of one GPU, and the job's streams.

    The GPU is given by its index. Marks order them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with thread_setup(device):
            names: tuple[Stream, ...] = ("h2d", "d2h", "gpu")
            self._streams = {name: _take_stream(device) for name in names}
            # Without other work, so that it passes events at once (but for
            # CUDA_DEVICE_MAX_CONNECTIONS=1).
            self._clock_stream = _take_stream(device)
            weakref.finalize(
                self,
                _free_streams[device].extend,
                [*self._streams.values(), self._clock_stream],
            )
            event, _ = self._next_anchor = self._record_anchor()
            event.synchronize()
            self._anchor = CudaAnchor(event, time.perf_counter())
        self.begin_iteration()

    def stream(self, name: Stream) -> torch.cuda.Stream:
        return (
            torch.cuda.current_stream(self._device)
            if name == "job"
            else self._streams[name]
        )

    def thread_setup(self) -> AbstractContextManager[None]:
        return thread_setup(self._device)

    def wait(self, stream: Stream, marks: Sequence[Mark]) -> None:
        for mark in marks:
            assert isinstance(mark, CudaMark)
            self.stream(stream).wait_event(mark.event)

    def record(self, stream: Stream) -> CudaMark:
        """Return a mark behind everything that was issued to a stream."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record(self.stream(stream))
        return CudaMark(self._device, event, self._anchor)

    def begin_iteration(self) -> None:
        """Begin an iteration on the calling thread's current stream.

        Memory is allocated in the order of this stream from now on, and the clock is
        set again.

        An anchor is used when it was passed. Nothing waits for it: work of the job may
        be before it."""
        with thread_setup(self._device):
            self._streams["memory"] = torch.cuda.current_stream()
            event, recorded_s = self._next_anchor
            if event.query():
                self._anchor = CudaAnchor(
                    event, max(recorded_s, self._anchor.time_s(event))
                )
                self._next_anchor = self._record_anchor()

    def _record_anchor(self) -> tuple[torch.cuda.Event, float]:
        """Return an event on the stream of the clock, and the time before it."""
        recorded_s = time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._clock_stream)
        return event, recorded_s


@contextmanager
def _relaxed_captures() -> Iterator[None]:
    """Return a context for allocating while another thread captures a CUDA graph.

    By default a thread may not.
    """
    before = _exchange(_RELAXED)
    try:
        yield
    finally:
        # The job's own threads go on in the mode that they had.
        _exchange(before)


def _exchange(mode: int) -> int:
    """Set the capture mode of the calling thread, and return the one before."""
    value = ctypes.c_int(mode)
    error = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    if error:
        _warn(error)
    return value.value


@functools.cache
def _warn(error: int) -> None:
    log.warning(
        "ebbtide: CUDA graphs may not be captured during training (CUDA error %d)",
        error,
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


T = TypeVar("T", bytes, float)

# The share of the device that stays free: for fragments, larger batches, and other
# processes.
MARGIN = 0.08
# Results are multiples of this, so that small changes do not cause a new plan.
_UNIT = 64 << 20


class CudaDevice(CudaStreams, Device):
    """A GPU (without an index, the current one). Work is issued to streams, and marks
    are CUDA events.

    It has not run on a GPU yet. Raises EngineError if the calling thread captures a
    CUDA graph."""

    # CUDA refuses it, and the child has no pinned memory.
    survives_forks = False

    def __init__(self, device: torch.device) -> None:
        if self.is_capturing():
            raise EngineError(
                "the first step cannot be captured in a CUDA graph: run some steps "
                "before the capture"
            )
        if torch.version.hip is not None:
            raise EngineError(
                "GPUs of AMD (ROCm) are not supported: train on an NVIDIA GPU, or with "
                "torch.optim.AdamW"
            )
        try:
            from ebbtide.interleave.engine.numerics import triton_kernel
        except ImportError as error:
            raise EngineError(
                f"updates on a GPU need Triton ({error}): pip install triton"
            ) from error

        super().__init__(
            torch.device(
                "cuda",
                device.index
                if device.index is not None
                else torch.cuda.current_device(),
            )
        )
        self._kernel = triton_kernel
        self.numa_node = gpu_node(self._device)
        self._used = 0
        self._job_memory = JobMemory()
        self._lock = threading.RLock()
        try:
            self.sample_memory()
        except RuntimeError as error:
            raise EngineError(
                "the allocator of this process has no statistics: use torch's own "
                f"({error})"
            ) from error

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def used_bytes(self) -> int:
        return self._used

    def sample_memory(self) -> None:
        stats = torch.cuda.memory_stats(self._device)
        # Not the peaks of torch, which jobs reset.
        reserved_bytes, frees = (
            stats.get("reserved_bytes.all.current", 0),
            stats.get("num_device_free", 0),
        )
        with self._lock:
            self._job_memory.sample(reserved_bytes, self._used, frees)

    def free_bytes(self) -> float | None:
        """Return the memory that the job leaves free at its peak so far, minus a
        margin."""
        self.sample_memory()
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return self._job_memory.budget(total, others)

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream("memory")):
            block = self._allocate((rows, params), torch.float32)
        with self._lock:
            self._used += block.nbytes
            self._job_memory.record_own(self._used)
        return block

    def release(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._used -= tensor.nbytes

    def allocate_bytes(self, nbytes: int) -> torch.Tensor:
        return self._allocate((nbytes,), torch.uint8)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU has too little free memory: {str(error).splitlines()[0]}"
            ) from error

    def allocate_host(
        self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True
    ) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not pinned or not nbytes:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        return allocate_pinned(shape, dtype, self.numa_node)

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream(stream)):
            work()

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream(direction)):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)

    def update(self, updates: Sequence[TensorUpdate]) -> None:
        self._check_capture()
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream("gpu")):
            try:
                self._kernel.gpu_update(updates)
            except Exception as error:
                # It was not compiled, or the launch was refused.
                raise UpdateNotStarted(
                    f"the update on the GPU could not start: {error}"
                ) from error

    def share(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self.stream("job"))

    def sums_of_squares(
        self, gradients: Sequence[torch.Tensor]
    ) -> Callable[[], list[float]]:
        return self._started(self._kernel.gpu_sums_of_squares, gradients)

    def fingerprint(self, values: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
        return self._started(self._kernel.gpu_fingerprint, values)

    def warm_up(
        self,
        dtypes: Collection[tuple[torch.dtype, torch.dtype]],
        rule: UpdateRule = ADAMW,
    ) -> None:
        try:
            with torch.cuda.device(self._device):
                self._kernel.warm_up(self._device, dtypes, rule)
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise EngineError(
                f"the kernels of the GPU cannot be compiled and run ({reason[0]}): "
                "Triton needs a C compiler (gcc or "
                "clang), and a folder that it can write to (TRITON_CACHE_DIR)"
            ) from error

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def _check_capture(self) -> None:
        if self.is_capturing():
            raise EngineError(
                "the optimizer's kernels cannot be captured in a CUDA graph: call "
                "optimizer.synchronize() before it"
            )

    def _started(
        self,
        start: Callable[[Sequence[torch.Tensor]], Callable[[], list[T]]],
        tensors: Sequence[torch.Tensor],
    ) -> Callable[[], list[T]]:
        """Start a kernel, and return a function that waits for its results.

        The function may wait in any thread.
        """
        self._check_capture()
        with self.thread_setup():
            try:
                results = start(tensors)
            except RuntimeError as error:
                # The error of a launch by Triton is no error of torch.
                raise EngineError(
                    f"sums or fingerprints on the GPU could not start: {error}"
                ) from error

        def wait() -> list[T]:
            with self.thread_setup():
                return results()

        return wait


class JobMemory:
    """Separates memory that torch reserved for the optimizer from the job's memory.

    The job's memory is taken at its peak so far, the optimizer's at its own peak since
    torch last returned memory of the pools that it keeps for each stream.
    """

    def __init__(self) -> None:
        # The highest sample, in bytes.
        self._job_peak = 0
        # Peaks of the optimizer's own memory, in bytes: since memory was returned, and
        # since the last sample.
        self._own_peak = 0
        self._recent_own_peak = 0
        self._frees = 0

    def record_own(self, used_bytes: int) -> None:
        """Record the memory that the optimizer uses, after an allocation."""
        self._own_peak = max(self._own_peak, used_bytes)
        self._recent_own_peak = max(self._recent_own_peak, used_bytes)

    def sample(self, reserved_bytes: int, used_bytes: int, frees: int) -> None:
        """Record how much memory torch has reserved and the optimizer uses.

        Record also how often torch has returned some.
        """
        if frees != self._frees:
            self._frees = frees
            self._own_peak = self._recent_own_peak
        self._recent_own_peak = used_bytes
        self._job_peak = max(self._job_peak, reserved_bytes - self._own_peak)

    def budget(self, total_bytes: int, others_bytes: int) -> float:
        """Return the bytes that are left to the optimizer.

        The job's peak so far, other processes and the CUDA context leave them.
        """
        left_bytes = int((1 - MARGIN) * total_bytes) - others_bytes - self._job_peak
        return float(max(0, left_bytes // _UNIT * _UNIT))
