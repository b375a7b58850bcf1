"""The tensor types of torch.cuda from before data types and devices were arguments, as `torch.cuda.FloatTensor`."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.profiler.agent.patches import Patches

_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class _LegacyType(type):
    """A type that makes tensors of a data type on the device, and that such tensors are instances of."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Any:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.tensor(args[0], dtype=cls.dtype, device="cuda")
        return torch.empty(*args, dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype == cls.dtype and value.device.type == "cuda"


def patch_legacy_types(patches: Patches) -> None:
    """Replace the types, and let `Tensor.type` convert to them, until `patches.undo()`."""
    for name, dtype in _DTYPES.items():
        patches.set(torch.cuda, name, _LegacyType(name, (), {"dtype": dtype, "__module__": "torch.cuda"}))
    convert = torch.Tensor.type

    def type_of(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = getattr(torch.cuda, dtype.removeprefix("torch.cuda."), dtype)
        if isinstance(dtype, _LegacyType):
            return tensor.to("cuda", dtype.dtype)
        return convert(tensor, dtype, *args, **kwargs)

    patches.set(torch.Tensor, "type", type_of)
