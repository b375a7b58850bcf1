"""Fake tensors in pickles: those that share memory share it again."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.features.dryrun.torch_2_13.device.tensor_patches import FAKE_ATTRIBUTES
from ebbtide.profiler.agent.patches import Patches

# The object of a storage that a pickle has once, in the storage's attributes.
_CONTENT = "_ebbtide_content"


class PickledStorage:
    """The memory of fake tensors in a pickle."""

    def __init__(self, size: int, device: str) -> None:
        self._size, self._device = size, device
        self._tensor: Any = None

    def __reduce__(self) -> Any:
        return type(self), (self._size, self._device)

    def tensor(self, dtype: torch.dtype) -> Any:
        """Return a tensor with all of the memory, which is made at first use."""
        if self._tensor is None:
            self._tensor = torch.empty(
                self._size, dtype=torch.uint8, device=self._device
            )
        width = torch.empty((), dtype=dtype).element_size()
        return self._tensor[: self._size // width * width].view(dtype)


def patch_pickles(patches: Patches) -> None:
    """Let pickles have fake tensors of the device, until `patches.undo()`."""
    patches.set(FakeTensor, "__reduce_ex__", _reduce)


def _reduce(tensor: Any, protocol: Any) -> Any:
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cuda"
    if not is_dense or type(tensor) is not FakeTensor:
        return torch.Tensor.__reduce_ex__(tensor, protocol)
    storage = tensor.untyped_storage()
    content = vars(storage).setdefault(
        _CONTENT, PickledStorage(storage.nbytes(), str(tensor.device))
    )
    attributes = {
        key: value for key, value in vars(tensor).items() if key not in FAKE_ATTRIBUTES
    }
    layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    settings = is_parameter, tensor.requires_grad
    return _rebuild, (content, tensor.dtype, layout, settings, attributes)


def _rebuild(
    content: PickledStorage,
    dtype: torch.dtype,
    layout: Any,
    settings: tuple[bool, bool],
    attributes: dict[str, Any],
) -> Any:
    is_parameter, requires_grad = settings
    tensor = torch.as_strided(content.tensor(dtype), *layout).detach()
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    else:
        tensor.requires_grad_(requires_grad)
    vars(tensor).update(attributes)
    return tensor
