"""Emulated device to run the engine without a GPU: host memory with a hard limit, and
streams with throttled copies."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ebbtide.interleave.engine.devices.device import Device, Direction, Mark, Stream
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.forks import (
    Completion,
    WorkQueue,
    fork_generation,
    fork_lock,
)
from ebbtide.interleave.engine.numerics.joined_updates import joined_updates
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import UpdateRule
from ebbtide.units import ByteCount, byte_count

# Copies are throttled in chunks of this size, so that a changed rate takes effect at
# once.
_CHUNK_BYTES = 1 << 20


class EmulatedMark:
    """A point of an emulated stream."""

    def __init__(self) -> None:
        self.time_s = math.nan
        self._passed = Completion()
        self._generation = fork_generation()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        """Pass the mark; with an error, if work before it failed."""
        self.time_s, self._error = time.perf_counter(), error
        self._passed.set()

    @property
    def is_passed(self) -> bool:
        return self._passed.is_set

    def synchronize(self) -> None:
        """Wait until the stream has passed it. Raises EngineError if work failed."""
        if not self.is_passed and self._generation != fork_generation():
            raise EngineError(
                "this process was forked while another thread copied to or from the "
                "device: call ebbtide in the "
                "process that was forked, or fork on the thread that trains"
            )
        self._passed.wait()
        if self._error is not None:
            raise EngineError(f"the device failed: {self._error}") from self._error


class EmulatedStreams:
    """Streams for work in host memory. After work failed, none of them does any more: a
    GPU ends like that too."""

    def __init__(self) -> None:
        names: tuple[Stream, ...] = ("h2d", "d2h", "gpu")
        self._queues: dict[Stream, WorkQueue] = {
            name: WorkQueue(f"ebbtide-emulated-{name}") for name in names
        }
        self._error: BaseException | None = None

    def thread_setup(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        self._queues[stream].put(lambda: self._run(work))

    def wait(self, stream: Stream, marks: Sequence[Mark]) -> None:
        for mark in marks:
            if stream == "job":
                mark.synchronize()
            else:
                self.submit(stream, mark.synchronize)

    def record(self, stream: Stream) -> Mark:
        """Return a mark.

        A mark of the job is passed at once, since a job on the CPU issues no work.
        """
        mark = EmulatedMark()
        if stream in ("job", "memory"):
            mark.set()
        elif not self._queues[stream].is_started:
            # Nothing was issued to it, and at the end of a process no thread can start.
            mark.set(self._error)
        else:
            self._queues[stream].put(lambda: mark.set(self._error))
        return mark

    def close(self) -> None:
        """Do all work and end the threads."""
        for queue in self._queues.values():
            queue.close()

    def _run(self, work: Callable[[], object]) -> None:
        if self._error is None:
            try:
                work()
            except BaseException as error:
                # Streams that wait for the failed one fail too.
                self._error = self._error or error


class EmulatedDevice(EmulatedStreams, Device):
    """A device in host memory, with throttled copies in two directions.

    Its arithmetic is real. A capacity of None is no limit. Streams work as on a GPU,
    which exposes races and lost bytes; its times say nothing about performance.
    """

    def __init__(
        self,
        capacity_bytes: ByteCount | None = None,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        gpu_update_params_per_s: float | None = None,
    ) -> None:
        super().__init__()
        # These may be changed at any time.
        self.capacity_bytes = (
            None
            if capacity_bytes is None
            else byte_count(capacity_bytes, "capacity_bytes")
        )
        self.rates: dict[Direction, float | None] = {
            "h2d": h2d_bytes_per_s,
            "d2h": d2h_bytes_per_s,
        }
        self.gpu_update_params_per_s = gpu_update_params_per_s
        # The high-water mark of `used_bytes` and of what the job has claimed.
        self.peak_bytes = 0
        self.numa_node = None
        self._used = self._claimed = self._claimed_peak = 0
        # Addresses of allocated blocks: releasing one twice raises KeyError.
        self._addresses: set[int] = set()
        # Re-entrant: the garbage collector may release a block during an allocation.
        self._lock = fork_lock()
        self._kernel = CpuKernel(1)

    @property
    def used_bytes(self) -> int:
        return self._used - self._claimed

    def free_bytes(self) -> float | None:
        """Return the capacity without the memory that the job's activations have
        claimed at their peak."""
        return (
            None
            if self.capacity_bytes is None
            else max(0.0, self.capacity_bytes - self._claimed_peak)
        )

    def claim(self, nbytes: int) -> None:
        with self._lock:
            self._use(nbytes)
            self._claimed += nbytes
            self._claimed_peak = max(self._claimed_peak, self._claimed)

    def unclaim(self, nbytes: int) -> None:
        with self._lock:
            self._used -= nbytes
            self._claimed -= nbytes

    def allocate_bytes(self, nbytes: int) -> torch.Tensor:
        # All bits are set, which is NaN, as in allocate_state.
        return torch.full((nbytes,), 255, dtype=torch.uint8, device="cpu")

    def _use(self, nbytes: int) -> None:
        if (
            self.capacity_bytes is not None
            and self._used + nbytes > self.capacity_bytes
        ):
            free = self.capacity_bytes - self._used
            raise DeviceMemoryError(
                f"the device has {free:.0f} bytes left, and {nbytes} are needed"
            )
        self._used += nbytes
        self.peak_bytes = max(self.peak_bytes, self._used)

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        nbytes = rows * torch.float32.itemsize * params
        with self._lock:
            self._use(nbytes)
            # NaN shows reads of memory that was not written yet.
            block = torch.full(
                (rows, params), float("nan"), dtype=torch.float32, device="cpu"
            )
            self._addresses.add(block.data_ptr())
        return block

    def release(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._addresses.remove(tensor.data_ptr())
            self._used -= tensor.nbytes
        # NaN also shows reads after the release.
        tensor.fill_(float("nan"))

    def allocate_host(
        self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True
    ) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu")

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for source, target in pairs:
            # Work that fails later would end the device.
            if source.numel() != target.numel() or not target.is_contiguous():
                raise EngineError(
                    "a copy needs a contiguous target of the same size, not strides "
                    f"of {target.stride()} with "
                    f"{target.numel()} elements for {source.numel()}"
                )
        self.submit(direction, lambda: self.run_copies(direction, pairs))

    def run_copies(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Copy each (source, target) at the rate of the direction. The stream of the
        direction calls this."""
        start_s, duration_s = time.perf_counter(), 0.0
        for source, target in pairs:
            if (
                source.nbytes <= _CHUNK_BYTES
                and not self.rates[direction]
                and source.shape == target.shape
            ):
                target.copy_(source)
                continue
            source, target = source.reshape(-1), target.view(-1)
            chunk = max(1, _CHUNK_BYTES // source.element_size())
            for begin in range(0, len(source), chunk):
                part = source[begin : begin + chunk]
                target[begin : begin + chunk].copy_(part)
                rate = self.rates[direction]
                if rate:
                    duration_s += part.nbytes / rate
                    _sleep_until(start_s + duration_s)

    def update(self, updates: Sequence[TensorUpdate]) -> None:
        self.submit("gpu", lambda: self.run_updates(updates))

    def run_updates(self, updates: Sequence[TensorUpdate]) -> None:
        """Update all tensors, at the rate of the device. The stream `gpu` calls
        this."""
        start_s = time.perf_counter()
        for update in joined_updates(updates):
            self._kernel.update(
                update.grad,
                update.state,
                update.written,
                update.scalars,
                rule=update.rule,
                position=update.position,
                shape=update.shape,
            )
        params = sum(update.out.numel() for update in updates)
        if self.gpu_update_params_per_s:
            _sleep_until(start_s + params / self.gpu_update_params_per_s)

    def sums_of_squares(
        self, gradients: Sequence[torch.Tensor]
    ) -> Callable[[], list[float]]:
        squares = self._kernel.sums_of_squares(gradients)
        return lambda: squares

    def fingerprint(self, values: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
        fingerprints = self._kernel.fingerprints(values)
        return lambda: fingerprints

    def warm_up(
        self,
        dtypes: Collection[tuple[torch.dtype, torch.dtype]],
        rule: UpdateRule = ADAMW,
    ) -> None:
        self._kernel.warm_up(dtypes, rule=rule)

    def is_capturing(self) -> bool:
        return False

    def close(self) -> None:
        super().close()
        self._kernel.close()


def _sleep_until(time_s: float) -> None:
    remaining_s = time_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)
