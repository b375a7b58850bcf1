"""A device that is none: it finds races, lost bytes and wrong order where there is no GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.errors import DeviceMemoryError
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Scalars

# Copies are throttled piece by piece, so that a rate that changes is felt at once.
_CHUNK_BYTES = 1 << 20


class EmulatedDevice:
    """Its memory is host memory with a capacity that is enforced; its link, two directions of throttled copies; its
    arithmetic, real. Never a figure of performance.

    capacity_bytes: None for no limit. Rates may be changed at any time; None: as fast as it goes.
    """

    def __init__(
        self,
        capacity_bytes: float | None = None,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        gpu_update_params_per_s: float | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.rates: dict[Direction, float | None] = {"h2d": h2d_bytes_per_s, "d2h": d2h_bytes_per_s}
        self.gpu_update_params_per_s = gpu_update_params_per_s
        self.peak_bytes = 0
        self._used = 0
        # Where blocks begin that are taken: giving one back twice raises KeyError.
        self._taken: set[int] = set()
        # Re-entrant: the garbage collector may give room back while some is taken.
        self._lock = threading.RLock()
        self._kernel = CpuKernel(1)

    @property
    def used_bytes(self) -> int:
        return self._used

    def free_bytes(self) -> float | None:
        return self.capacity_bytes

    def state(self, params: int, rows: int = 3) -> torch.Tensor:
        nbytes = rows * torch.float32.itemsize * params
        with self._lock:
            if self.capacity_bytes is not None and self._used + nbytes > self.capacity_bytes:
                free = self.capacity_bytes - self._used
                raise DeviceMemoryError(f"the device has {free:.0f} bytes left, and {nbytes} are needed")
            self._used += nbytes
            self.peak_bytes = max(self.peak_bytes, self._used)
            # Not a number: what is read before it is written shows.
            block = torch.full((rows, params), float("nan"), dtype=torch.float32, device="cpu")
            self._taken.add(block.data_ptr())
        return block

    def release(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._taken.remove(tensor.data_ptr())
            self._used -= tensor.nbytes
        # Nor is what is read after it was given back.
        tensor.fill_(float("nan"))

    def host(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu")

    def copy(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        begin, due = time.perf_counter(), 0.0
        for source, target in pairs:
            source, target = source.reshape(-1), target.view(-1)
            step = max(1, _CHUNK_BYTES // source.element_size())
            for at in range(0, len(source), step):
                part = source[at : at + step]
                target[at : at + step].copy_(part)
                rate = self.rates[direction]
                if rate:
                    due += part.nbytes / rate
                    _sleep_until(begin + due)

    def update(
        self,
        grad: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        scalars: Scalars,
    ) -> None:
        begin = time.perf_counter()
        self._kernel.update(grad, master, exp_avg, exp_avg_sq, out, scalars)
        if self.gpu_update_params_per_s:
            _sleep_until(begin + len(master) / self.gpu_update_params_per_s)

    def squares(self, gradient: torch.Tensor) -> Callable[[], float]:
        found = self._kernel.sum_of_squares(gradient)
        return lambda: found

    def mark(self) -> Callable[[], None]:
        return self.wait

    def wait(self) -> None:
        """All that the training thread does here is done when it returns from it."""

    def close(self) -> None:
        self._kernel.close()


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
