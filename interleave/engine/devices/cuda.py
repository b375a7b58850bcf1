"""A CUDA GPU as device of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from ebbtide.interleave.engine.devices.cuda_streams import CudaStreams, thread_setup
from ebbtide.interleave.engine.devices.device import Direction, Mark, Stream
from ebbtide.interleave.engine.devices.host_memory import allocate_pinned, gpu_node
from ebbtide.interleave.engine.devices.job_memory import JobMemory
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError, UpdateNotStarted
from ebbtide.interleave.engine.numerics.tensor_update import TensorUpdate

T = TypeVar("T", int, float)


class CudaDevice:
    """A GPU. Work is issued to streams, and marks are CUDA events. It has not run on a GPU yet.

    Args:
        device: The GPU; without an index, the current one.

    Raises:
        EngineError: If the calling thread captures a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        if self.is_capturing():
            raise EngineError("the first step cannot be captured in a CUDA graph: run some steps before the capture")
        if torch.version.hip is not None:
            raise EngineError("GPUs of AMD (ROCm) are not supported: train on an NVIDIA GPU, or with torch.optim.AdamW")
        try:
            from ebbtide.interleave.engine.numerics import triton_kernel
        except ImportError as error:
            raise EngineError(f"updates on a GPU need Triton ({error}): pip install triton") from error

        self._device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self._kernel = triton_kernel
        self.numa_node = gpu_node(self._device)
        self._streams = CudaStreams(self._device)
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
            with torch.cuda.device(self._device), torch.cuda.stream(self._streams.stream("memory")):
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
        return allocate_pinned(shape, dtype, self.numa_node)

    def thread_setup(self) -> AbstractContextManager[None]:
        return thread_setup(self._device)

    def wait(self, stream: Stream, marks: Sequence[Mark]) -> None:
        self._streams.wait(stream, marks)

    def record(self, stream: Stream) -> Mark:
        return self._streams.record(stream)

    def begin_iteration(self) -> None:
        self._streams.begin_iteration()

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        """Issue work to a stream: `work` calls functions of torch, which use the stream that is current."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams.stream(stream)):
            work()

    def copy(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams.stream(direction)):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)

    def update(self, updates: Sequence[TensorUpdate]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams.stream("gpu")):
            try:
                self._kernel.gpu_update(updates)
            except Exception as error:
                # It was not compiled, or the launch was refused.
                raise UpdateNotStarted(f"the update on the GPU could not start: {error}") from error

    def sums_of_squares(self, gradients: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
        return self._started(self._kernel.gpu_sums_of_squares, gradients)

    def fingerprint(self, values: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
        return self._started(self._kernel.gpu_fingerprint, values)

    def warm_up(self, dtypes: Collection[tuple[torch.dtype, torch.dtype]], remainder: bool = False) -> None:
        try:
            with torch.cuda.device(self._device):
                self._kernel.warm_up(self._device, dtypes, remainder)
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise EngineError(
                f"the kernels of the GPU cannot be compiled and run ({reason[0]}): Triton needs a C compiler (gcc or "
                "clang), and a folder that it can write to (TRITON_CACHE_DIR)"
            ) from error

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def _started(
        self, start: Callable[[Sequence[torch.Tensor]], Callable[[], list[T]]], tensors: Sequence[torch.Tensor]
    ) -> Callable[[], list[T]]:
        """Start a kernel, and return a function that waits for the results in any thread."""
        with self.thread_setup():
            results = start(tensors)

        def wait() -> list[T]:
            with self.thread_setup():
                return results()

        return wait

    def close(self) -> None:
        """Do nothing: the streams are destroyed with this object."""
