"""Memory of activations and weights, counted on the device until torch frees it, and
used again on the host."""

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ebbtide.interleave.engine.devices.device import Device, Mark
from ebbtide.interleave.engine.errors import DeviceMemoryError
from ebbtide.interleave.engine.forks import fork_lock
from ebbtide.units import bytes_text


class _Counted(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that is counted."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int

    # In `__new__`, so that no reference is without them when the storage is freed.
    def __new__(
        cls, storage: torch.UntypedStorage, callback: Callable[["_Counted"], None]
    ) -> "_Counted":
        counted: _Counted = super().__new__(cls, storage, callback)
        counted.key, counted.nbytes = storage._cdata, storage.nbytes()
        return counted


class LayerMemoryCount:
    """Counts the device memory of what layers hold, against a limit.

    The limit may be None. It is also counted on the device itself.
    """

    def __init__(self, device: Device, limit_bytes: float | None) -> None:
        self._device = device
        self.limit_bytes = limit_bytes
        self.used_bytes = self.peak_bytes = 0
        self._counted: dict[int, _Counted] = {}
        # Re-entrant: a storage may be freed while another one is counted.
        self._lock = fork_lock()

    def claim(self, nbytes: int) -> None:
        """Count bytes before they are used. Raises DeviceMemoryError if there are too
        few."""
        with self._lock:
            if (
                self.limit_bytes is not None
                and self.used_bytes + nbytes > self.limit_bytes
            ):
                raise DeviceMemoryError(
                    f"layers need {bytes_text(nbytes)} of device memory beside "
                    f"{bytes_text(self.used_bytes)} for what "
                    "moves, and their memory_budget is "
                    f"{bytes_text(self.limit_bytes)}: raise it, use smaller batches, "
                    "or let custom autograd functions use save_for_backward"
                )
            self._device.claim(nbytes)
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def unclaim(self, nbytes: int) -> None:
        with self._lock:
            self.used_bytes -= nbytes
            self._device.unclaim(nbytes)

    def is_counted(self, storage: torch.UntypedStorage) -> bool:
        counted = self._counted.get(storage._cdata)
        return counted is not None and counted() is storage

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, whose bytes are claimed, until it is freed."""
        with self._lock:
            self._counted[storage._cdata] = _Counted(storage, self._forget)

    def _forget(self, counted: _Counted) -> None:
        with self._lock:
            if self._counted.get(counted.key) is counted:
                del self._counted[counted.key]
            self.unclaim(counted.nbytes)


class HostCopy:
    """Pinned host memory (uint8) with copies of storages, and the marks of its last
    uses.

    The arena has the memory again when the last of these storages is gone.
    """

    def __init__(
        self, arena: "HostArena", memory: torch.Tensor, marks: Sequence[Mark]
    ) -> None:
        self.memory = memory
        self.marks = marks
        self._arena = arena

    def __del__(self) -> None:
        self._arena.give(self.memory, self.marks)


class _LentBytes(np.ndarray):
    """The bytes of a host block, which tensors in it keep."""

    block: HostCopy


class HostArena:
    """Hands out pinned host memory and keeps what comes back, since pinning is slow.

    Blocks are at most `slack` times as large as what is asked for. Where sizes vary,
    those too small for it are released first; with a slack of 1 there are few sizes,
    which come again."""

    def __init__(self, device: Device, slack: int = 2) -> None:
        self._device = device
        self._slack = slack
        self._free: list[tuple[torch.Tensor, Sequence[Mark]]] = []
        self._lock = fork_lock()
        self.allocated_bytes = 0

    def take(self, nbytes: int) -> HostCopy:
        with self._lock:
            # A collection may give blocks back at any line: they come to the end.
            sizes = [memory.nbytes for memory, _ in self._free]
            fitting = [
                index
                for index, size in enumerate(sizes)
                if nbytes <= size <= self._slack * nbytes
            ]
            if fitting:
                return HostCopy(
                    self, *self._free.pop(min(fitting, key=sizes.__getitem__))
                )
            if self._slack > 1:
                self.release(nbytes)
            memory = self._device.allocate_host((nbytes,), torch.uint8)
            self.allocated_bytes += nbytes
            return HostCopy(self, memory, ())

    def lend(self, like: torch.Tensor) -> tuple[torch.Tensor, HostCopy]:
        """Return a contiguous tensor of the same shape and dtype, and its block.

        The block comes back when the tensor's storage is freed.
        """
        block = self.take(like.nbytes)
        lent = block.memory[: like.nbytes].numpy().view(_LentBytes)
        lent.block = block
        tensor = torch.empty(0, dtype=like.dtype)
        # No view: writes to the block are none to the tensor.
        return tensor.set_(
            torch.from_numpy(lent).untyped_storage(), 0, like.shape
        ), block

    def give(self, memory: torch.Tensor, marks: Sequence[Mark]) -> None:
        with self._lock:
            self._free.append((memory, marks))

    def release(self, below_bytes: float = float("inf")) -> None:
        """Release free blocks that are smaller than a size."""
        with self._lock:
            blocks, self._free = self._free, []
            for memory, marks in blocks:
                if memory.nbytes >= below_bytes:
                    self._free.append((memory, marks))
                    continue
                for mark in marks:
                    mark.synchronize()
                self.allocated_bytes -= memory.nbytes
