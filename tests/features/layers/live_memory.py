"""The memory of tensors that live while layers run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from tests.interleave.engine.grid.models import Net


class CountingDevice(EmulatedDevice):
    """An emulated device that knows which memory is the host's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.host: list[weakref.ref[torch.UntypedStorage]] = []

    def allocate_host(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        memory = super().allocate_host(*args, **kwargs)
        self.host.append(weakref.ref(memory.untyped_storage()))
        return memory


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Every storage that operations make, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return result

    def nbytes(self, without: set[int]) -> int:
        alive = {
            key: storage
            for key, one in self._storages.items()
            if (storage := one()) is not None
        }
        return sum(
            storage.nbytes() for key, storage in alive.items() if key not in without
        )


@contextmanager
def watched(model: Net, device: CountingDevice) -> Iterator[list[int]]:
    """Return a context that lists the live bytes after each layer's forward.

    They are those of tensors that are made in it, without the layer's inputs and
    output, the host's and the model's."""
    seen: list[int] = []
    others: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    live = LiveBytes()

    def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        without = {
            tensor.untyped_storage()._cdata for tensor in [output, *args, *others]
        }
        without |= {
            storage._cdata for one in device.host if (storage := one()) is not None
        }
        seen.append(live.nbytes(without))

    handles = [layer.register_forward_hook(look) for layer in model.layers]
    # What the model itself holds on to.
    handles.append(
        model.embedding.register_forward_hook(
            lambda _, __, output: others.append(output)
        )
    )
    with live:
        yield seen
    for handle in handles:
        handle.remove()
