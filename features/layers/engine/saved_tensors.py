"""Tensors that autograd saves, as references to storages.

The storages may be on the host; later edits are checked for.
"""

import torch

from ebbtide.features.layers.engine.transfers import SavedStorage
from ebbtide.interleave.engine.errors import EngineError


class TensorVersion:
    """The version of a tensor, which writes in place raise. It does not keep the
    tensor's memory."""

    __slots__ = ("_counter", "number")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter = tensor.detach()
        self.number = self._counter._version
        # It shares the version with the tensor, and no longer the memory.
        self._counter.data = self._counter.new_empty(0)

    @property
    def is_changed(self) -> bool:
        return bool(self._counter._version != self.number)


class PackedTensor:
    """A tensor in a storage that a layer has saved.

    Without a storage the tensor is kept as it is.

    Autograd does not compare versions of tensors that it saves through hooks, so this
    does."""

    __slots__ = ("_dtype", "_geometry", "_kept", "_version", "layer", "storage")

    def __init__(
        self, tensor: torch.Tensor, storage: SavedStorage | None, layer: int
    ) -> None:
        self.storage = storage
        self.layer = layer
        self._version = TensorVersion(tensor)
        self._dtype = tensor.dtype
        # Detached: a tensor of the graph, inside the graph, would keep the whole graph
        # alive.
        self._kept = tensor.detach() if storage is None else None
        self._geometry = tensor.storage_offset(), tensor.size(), tensor.stride()

    def check(self, layer_name: str) -> None:
        """Raise EngineError if the tensor was written to after it was saved."""
        if self._version.is_changed:
            _, size, _ = self._geometry
            node = torch._C._current_autograd_node()
            raise EngineError(
                f"layer {layer_name}: a saved tensor "
                f"({str(self._dtype).removeprefix('torch.')} of shape "
                f"{tuple(size)}), which "
                f"{'recomputation' if node is None else node.name()} needs, was "
                "modified in "
                "place after it was saved. No gradient was computed from it: use the "
                "operation that is not in place"
            )

    def get(self) -> torch.Tensor:
        """Return the tensor, whose storage is on the device, or was kept."""
        if self.storage is None:
            assert self._kept is not None
            return self._kept
        storage = self.storage.hold()
        assert storage is not None
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(
            storage, *self._geometry
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its storage, size and strides.

    A copy of the bytes is then a copy of the tensor.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.untyped_storage().nbytes() > 0
    )
