"""A GPU: streams for the copies and the update, events for what the training thread has issued, pinned host memory of
exactly the size that is needed."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.numerics.reference import Scalars

# Left free for what others allocate between one look and the next.
_MARGIN = 0.02
_BYTES = 1 << 20


class CudaDevice:
    """The executor's threads issue to a stream each and wait for it without the GIL, so that an operation is done when
    its call returns. Written for CUDA; it has not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        # triton is there where torch was built for CUDA.
        from ebbtide.interleave.engine.numerics import triton_kernel

        self._device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self._kernel = triton_kernel
        with torch.cuda.device(self._device):
            self._streams = {"h2d": torch.cuda.Stream(), "d2h": torch.cuda.Stream(), "gpu": torch.cuda.Stream()}
        self._used = 0
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        return self._used

    def free_bytes(self) -> float | None:
        """What the job has left at its peak so far, and what state takes of it; less a margin."""
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        others = total - free - reserved
        peak = torch.cuda.max_memory_allocated(self._device) - self._used
        left = total - others - max(peak, 0) - _MARGIN * total
        # In steps, so that a plan is made anew only where it matters.
        return float(max(0, int(left) // (64 * _BYTES) * (64 * _BYTES)))

    def state(self, params: int, rows: int = 3) -> torch.Tensor:
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._streams["h2d"]):
                found = torch.empty((rows, params), dtype=torch.float32, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(f"the GPU has no room: {str(error).splitlines()[0]}") from error
        with self._lock:
            self._used += found.nbytes
        return found

    def release(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._used -= tensor.nbytes

    def host(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not pinned or not nbytes:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        # torch's own pinned memory is rounded up to a power of two. Whole pages of their own: no page is pinned twice.
        memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        pointer = memory.ctypes.data
        error = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))
        if error:
            raise EngineError(
                f"{nbytes} bytes of host memory cannot be pinned (CUDA error {error}): lower what other processes pin, "
                "raise the limit of locked memory (ulimit -l), or offload less"
            )
        weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, pointer)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def copy(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        stream = self._streams[direction]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        done.synchronize()

    def update(
        self,
        grad: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        scalars: Scalars,
    ) -> None:
        stream = self._streams["gpu"]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._kernel.gpu_update(grad, master, exp_avg, exp_avg_sq, out, scalars)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        done.synchronize()

    def squares(self, gradient: torch.Tensor) -> Callable[[], float]:
        return self._kernel.gpu_sum_of_squares(gradient)

    def mark(self) -> Callable[[], None]:
        made = torch.cuda.Event(blocking=True)
        made.record(torch.cuda.current_stream(self._device))
        return lambda: made.synchronize()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Streams end with this object."""
