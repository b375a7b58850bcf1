"""Storages of fake tensors, which are reported to the sink until they are released."""

import weakref
from typing import Any

import torch

from ebbtide.features.dryrun.sink import Sink
from ebbtide.profiler.agent.patches import Patches


class FollowedStorages:
    """The storages on the device and on the host, by their addresses."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        # References whose callbacks release the memory.
        self._on_device: dict[int, Any] = {}
        self._on_host: dict[int, Any] = {}

    def install(self, patches: Patches) -> None:
        """Replace the methods of tensors that pin memory, until `patches.undo()`."""
        memory = self._sink.host_memory

        def pin_memory(tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
            storage = tensor.untyped_storage()
            if memory.pin(storage._cdata, storage.nbytes()):
                self._refer_on_host(storage)
            return tensor

        def is_pinned(tensor: Any, *_args: Any, **_kwargs: Any) -> bool:
            return memory.is_pinned(tensor.untyped_storage()._cdata)

        patches.set(torch.Tensor, "pin_memory", pin_memory)
        patches.set(torch.Tensor, "is_pinned", is_pinned)

    def has(self, storage: Any) -> bool:
        """Return whether a storage on the device is followed."""
        return self._sink.memory.has(storage._cdata)

    def add(self, storage: Any, stack: int) -> None:
        """Follow a new storage on the device."""
        if not self._sink.clock.closed:
            self._refer(storage)
            self._sink.alloc(storage._cdata, storage.nbytes(), stack)

    def add_on_host(self, storage: Any) -> None:
        """Follow the storage of a fake tensor of the host, if it is not yet."""
        if self._sink.host_memory.add(storage._cdata, storage.nbytes()):
            self._refer_on_host(storage)

    def take_over(self, old: Any, new: Any) -> bool:
        """Let a new storage have the memory of an old one, and return whether it
        can."""
        memory = self._sink.memory
        if not memory.take_over(old._cdata, new._cdata, new.nbytes()):
            return False
        del self._on_device[old._cdata]
        self._refer(new)
        return True

    def resize(self, storage: Any, stack: int) -> None:
        """Account for a storage that has changed its size."""
        sink = self._sink
        sink.memory.resize(storage._cdata, storage.nbytes(), stack, sink.module)

    def _refer(self, storage: Any) -> None:
        key = storage._cdata
        self._on_device[key] = weakref.ref(storage, lambda _: self._release(key))

    def _refer_on_host(self, storage: Any) -> None:
        key = storage._cdata
        self._on_host[key] = weakref.ref(storage, lambda _: self._release_host(key))

    def _release(self, key: int) -> None:
        self._on_device.pop(key, None)
        self._sink.free(key)

    def _release_host(self, key: int) -> None:
        del self._on_host[key]
        self._sink.host_memory.free(key)
