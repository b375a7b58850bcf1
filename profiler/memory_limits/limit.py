"""The limit of memory for a block of code: a context manager, which is a decorator, too."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType
from typing import TYPE_CHECKING

from ebbtide.units import bytes_text, parse_bytes

if TYPE_CHECKING:
    from ebbtide.profiler.memory_limits.peaks import CpuPeak, CudaPeak, Peak

_MAX_LISTED = 10


class MemoryLimitExceeded(AssertionError):
    """The peak of memory in a block exceeded its limit.

    Attributes:
        device: The device.
        limit_bytes: The limit.
        peak_bytes: The peak.
        holders: (call site, bytes) at the peak, the largest first.
    """

    def __init__(self, device: str, limit_bytes: int, peak: Peak) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.peak_bytes = peak.bytes
        self.holders = list(peak.holders)
        lines = [
            f"the peak of memory on {device} is {bytes_text(peak.bytes)}, above the limit of {bytes_text(limit_bytes)}"
        ]
        lines += [f"  {bytes_text(size):>12}  {site}" for site, size in self.holders[:_MAX_LISTED]]
        if len(self.holders) > _MAX_LISTED:
            rest = sum(size for _, size in self.holders[_MAX_LISTED:])
            lines.append(f"  {bytes_text(rest):>12}  {len(self.holders) - _MAX_LISTED} other call sites")
        super().__init__("\n".join(lines))


class _MemoryLimit(ContextDecorator):
    def __init__(self, limit: str | int, device: str | None) -> None:
        self._limit_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
        if self._limit_bytes < 0:
            raise ValueError(f"a limit of {limit} bytes is below 0")
        self._device = device
        self._recorder: CpuPeak | CudaPeak | None = None

    def _recreate_cm(self) -> _MemoryLimit:
        """Return an object for one call of a decorated function."""
        return _MemoryLimit(self._limit_bytes, self._device)

    def __enter__(self) -> None:
        self._recorder = _recorder(self._device)
        self._recorder.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        peak = recorder.stop(self._limit_bytes)
        if error is None and peak.bytes > self._limit_bytes:
            raise MemoryLimitExceeded(recorder.device, self._limit_bytes, peak)


def memory_limit(limit: str | int, device: str | None = None) -> _MemoryLimit:
    """Return a context manager that fails if a block of code uses more memory than a limit; a decorator, too.

    On CUDA the peak is that of torch's allocator (`max_memory_allocated`, which is reset), and includes what was
    allocated before the block. On the CPU it is the bytes of tensors, from torch's profiler: those that were alive
    before the block, as long as they live, and those that the block allocates. Memory that is not a tensor's does not
    count there.

    Args:
        limit: Bytes, as a number or as text like `500MB`, `20GB` or `2GiB`.
        device: `cpu`, `cuda` or `cuda:1`; None: the current CUDA device, and the CPU where there is none.

    Raises:
        ValueError: The limit is not a size.
        MemoryLimitExceeded: At the end of the block, where its peak exceeds the limit. An exception of the block itself
            is passed on instead.
    """
    return _MemoryLimit(limit, device)


def _recorder(device: str | None) -> CpuPeak | CudaPeak:
    import torch

    from ebbtide.profiler.memory_limits.peaks import CpuPeak, CudaPeak

    kind, _, number = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{device!r} is not a device: write cpu, cuda or cuda:1")
    if kind == "cpu":
        return CpuPeak()
    return CudaPeak(int(number) if number else torch.cuda.current_device())
