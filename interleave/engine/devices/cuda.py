"""A CUDA GPU as device of the engine.

It uses streams for copies and updates, and events for the work of the training thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch

from ebbtide.interleave.engine.devices.capture_mode import tolerate_captures
from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.devices.host_memory import allocate_pinned
from ebbtide.interleave.engine.devices.job_memory import JobMemory
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError, UpdateNotStarted
from ebbtide.interleave.engine.numerics.reference import Hyper, Scalars

# Elements of the tensors that a warm-up runs on.
_WARM_UP_PARAMS = 64


class CudaDevice:
    """A GPU. Each thread of the executor issues to its own stream and waits for it without the GIL.

    An operation is done when its call returns. This class is written for CUDA and has not run on a GPU yet.

    Args:
        device: The GPU; without an index, the current one.

    Raises:
        EngineError: If the calling thread captures a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        if self.is_capturing():
            raise EngineError("the first step cannot be captured in a CUDA graph: run some steps before the capture")
        # CUDA builds of torch include triton.
        from ebbtide.interleave.engine.numerics import triton_kernel

        self._device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self._kernel = triton_kernel
        with torch.cuda.device(self._device):
            self._streams = {"h2d": torch.cuda.Stream(), "d2h": torch.cuda.Stream(), "gpu": torch.cuda.Stream()}
        self._used = 0
        self._job_memory = JobMemory()
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        return self._used

    def sample_memory(self) -> None:
        stats = torch.cuda.memory_stats(self._device)
        # Not the peaks of torch, which jobs reset.
        reserved_bytes, frees = stats.get("reserved_bytes.all.current", 0), stats.get("num_device_free", 0)
        with self._lock:
            self._job_memory.sample(reserved_bytes, self._used, frees)

    def free_bytes(self) -> float | None:
        """Return the memory that the job leaves free at its peak so far, minus a margin."""
        self.sample_memory()
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return self._job_memory.budget(total, others)

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._streams["h2d"]):
                block = torch.empty((rows, params), dtype=torch.float32, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(f"the GPU has too little free memory: {str(error).splitlines()[0]}") from error
        with self._lock:
            self._used += block.nbytes
            self._job_memory.record_own(self._used)
        return block

    def release(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._used -= tensor.nbytes

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not pinned or not nbytes:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        return allocate_pinned(shape, dtype)

    def copy(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        tolerate_captures()
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
        tolerate_captures()
        stream = self._streams["gpu"]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            try:
                self._kernel.gpu_update(grad, master, exp_avg, exp_avg_sq, out, scalars)
            except Exception as error:
                # It was not compiled, or the launch was refused.
                raise UpdateNotStarted(f"the update on the GPU could not start: {error}") from error
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        done.synchronize()

    def sum_of_squares(self, gradient: torch.Tensor) -> Callable[[], float]:
        return self._kernel.gpu_sum_of_squares(gradient)

    def fingerprint(self, values: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
        with torch.cuda.device(self._device):
            return self._kernel.gpu_fingerprint(values)

    def warm_up(self, dtypes: Collection[tuple[torch.dtype, torch.dtype]]) -> None:
        scalars = Hyper().scalars(1)
        try:
            for grad_dtype, dtype in dtypes:
                grad, out = (
                    torch.zeros(_WARM_UP_PARAMS, dtype=kind, device=self._device) for kind in (grad_dtype, dtype)
                )
                state = torch.zeros((3, _WARM_UP_PARAMS), dtype=torch.float32, device=self._device)
                self._kernel.gpu_update(grad, state[0], state[1], state[2], out, scalars)
                self._kernel.gpu_sum_of_squares(grad)()
                self._kernel.gpu_fingerprint([out])()
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise EngineError(
                f"the kernels of the GPU cannot be compiled and run ({reason[0]}): Triton needs a C compiler (gcc or "
                "clang), and a folder that it can write to (TRITON_CACHE_DIR)"
            ) from error

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def record_event(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return lambda: event.synchronize()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Do nothing: the streams are destroyed with this object."""
