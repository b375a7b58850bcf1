"""A CUDA GPU as device of the engine.

It uses streams for copies and updates, events for the work of the training thread, and pinned host memory of exactly
the requested size.
"""

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

# Share of the memory that stays free for what others allocate between two queries.
_MARGIN = 0.02
_MIB = 1 << 20


class CudaDevice:
    """A GPU. Each thread of the executor issues to its own stream and waits for it without the GIL.

    An operation is done when its call returns. This class is written for CUDA and has not run on a GPU yet.

    Args:
        device: The GPU; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        # CUDA builds of torch include triton.
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
        """Return the memory that the job leaves free at its peak so far, including what state uses, minus a margin."""
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        others = total - free - reserved
        peak = torch.cuda.max_memory_allocated(self._device) - self._used
        left = total - others - max(peak, 0) - _MARGIN * total
        # Rounded down, so that small changes do not cause a new plan.
        return float(max(0, int(left) // (64 * _MIB) * (64 * _MIB)))

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._streams["h2d"]):
                block = torch.empty((rows, params), dtype=torch.float32, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(f"the GPU has too little free memory: {str(error).splitlines()[0]}") from error
        with self._lock:
            self._used += block.nbytes
        return block

    def release(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._used -= tensor.nbytes

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not pinned or not nbytes:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        # torch rounds pinned memory up to a power of two. A mapping has whole pages, so that no page is pinned twice.
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

    def sum_of_squares(self, gradient: torch.Tensor) -> Callable[[], float]:
        return self._kernel.gpu_sum_of_squares(gradient)

    def record_event(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return lambda: event.synchronize()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Do nothing: the streams are destroyed with this object."""
