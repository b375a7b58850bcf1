"""Safetensors files as fake tensors: only their headers are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.profiler.agent.patches import Patches

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20


class FakeSafetensors:
    """A file as `safetensors.safe_open` returns it.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a safetensors file.
    """

    def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **_options: Any) -> None:
        with open(os.fspath(filename), "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"{filename} is not a safetensors file")
            self._entries: dict[str, Any] = json.loads(file.read(size))
        self._metadata: dict[str, str] | None = self._entries.pop("__metadata__", None)
        self._device = device

    def __enter__(self) -> FakeSafetensors:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def metadata(self) -> dict[str, str] | None:
        """Return the texts in the header."""
        return self._metadata

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their data."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"])

    def get_tensor(self, name: str) -> Any:
        """Return a tensor."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> FakeSlice:
        """Return a tensor that is made when it is indexed."""
        return FakeSlice(self._entries[name], self._device)


class FakeSlice:
    """A tensor of a file, which is made when it is indexed."""

    def __init__(self, entry: dict[str, Any], device: Any) -> None:
        self._entry, self._device = entry, device

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """Return the data type, as the file names it."""
        return str(self._entry["dtype"])

    def __getitem__(self, index: Any) -> Any:
        whole = torch.empty(self._entry["shape"], dtype=_DTYPES[self._entry["dtype"]], device="cpu")
        return whole[index].to(self._device)


def patch_safetensors(patches: Patches, count_save: Callable[..., None]) -> None:
    """Replace what reads and writes safetensors files until `patches.undo()`; nothing where it is not installed.

    Args:
        patches: The replacements.
        count_save: Counts the tensors that would have been saved.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        return

    def load_file(filename: Any, device: Any = "cpu", **_options: Any) -> dict[str, Any]:
        file = FakeSafetensors(filename, device=device)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict

    patches.set(safetensors, "safe_open", FakeSafetensors)
    patches.set(safetensors.torch, "safe_open", FakeSafetensors)
    patches.set(safetensors.torch, "load_file", load_file)
    patches.set(safetensors.torch, "save_file", count_save)
