"""Safetensors files as fake tensors: their headers are read, and values of small
tensors, on which a job may branch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from ebbtide.features.dryrun.files.safetensors_header import DTYPES, header_of
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import MAX_ELEMENTS
from ebbtide.profiler.agent.patches import Patches

_MAX_HEADER_BYTES = 100 << 20


class FakeSafetensors:
    """A file as `safetensors.safe_open` returns it."""

    def __init__(
        self, filename: Any, framework: str = "pt", device: Any = "cpu", **_options: Any
    ) -> None:
        if isinstance(filename, bytes):
            size = int.from_bytes(filename[:8], "little")
            header = filename[8 : 8 + size]
        else:
            with open(os.fspath(filename), "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = file.read(size) if size <= _MAX_HEADER_BYTES else b""
        if len(header) != size:
            raise ValueError(f"{filename!r} is not a safetensors file")
        self._entries: dict[str, Any] = json.loads(header)
        self._metadata: dict[str, str] | None = self._entries.pop("__metadata__", None)
        self._device, self._source, self._start = device, filename, 8 + size

    def __enter__(self) -> FakeSafetensors:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def keys(self) -> list[str]:
        return list(self._entries)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their data."""
        return sorted(
            self._entries, key=lambda name: self._entries[name]["data_offsets"]
        )

    def get_tensor(self, name: str) -> Any:
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        return {name: self.get_tensor(name) for name in self._entries}

    def get_slice(self, name: str) -> FakeSlice:
        """Return a tensor that is made when it is indexed."""
        return FakeSlice(self._entries[name], self._device, self._read)

    def _read(self, start: int, end: int) -> bytearray:
        """Return bytes of the file's data, with zeros for those that it lacks."""
        if isinstance(self._source, bytes):
            data = self._source[self._start + start : self._start + end]
        else:
            with open(os.fspath(self._source), "rb") as file:
                file.seek(self._start + start)
                data = file.read(end - start)
        return bytearray(data.ljust(end - start, b"\0"))


class FakeSlice:
    """A tensor of a file, which is made when it is indexed."""

    def __init__(
        self, entry: dict[str, Any], device: Any, read: Callable[[int, int], bytearray]
    ) -> None:
        self._entry, self._device, self._read = entry, device, read

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        return str(self._entry["dtype"])

    def __getitem__(self, index: Any) -> Any:
        shape, dtype = (
            self._entry["shape"],
            getattr(torch, DTYPES[self._entry["dtype"]]),
        )
        if 0 < prod(shape) <= MAX_ELEMENTS:
            whole = torch.frombuffer(
                self._read(*self._entry["data_offsets"]), dtype=dtype
            ).reshape(shape)
        else:
            whole = torch.empty(shape, dtype=dtype, device="cpu")
        return whole[index].to(self._device)


def patch_safetensors(
    patches: Patches, save_tensors: Callable[[dict[str, Any], Any, bytes], None]
) -> None:
    """Replace what reads and writes safetensors files until `patches.undo()`; nothing
    where it is not installed. `save_tensors`: gets the tensors that would have been
    saved, the file or None, and the header of the file."""
    try:
        import safetensors
        import safetensors.torch as library
    except ImportError:
        return

    def write_file(
        tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None
    ) -> None:
        save_tensors(tensors, filename, header_of(tensors, metadata))

    def to_bytes(
        tensors: dict[str, Any], metadata: dict[str, str] | None = None
    ) -> bytes:
        header = header_of(tensors, metadata)
        save_tensors(tensors, None, header)
        return header

    original = safetensors.safe_open
    for module in list(sys.modules.values()):
        if vars(module).get("safe_open") is original:
            patches.set(module, "safe_open", FakeSafetensors)
    # Below the public functions, which a library may have taken already.
    flatten = "_flatten_as_ptr" if hasattr(library, "_flatten_as_ptr") else "_flatten"
    patches.set(library, flatten, lambda tensors, *_references: tensors)
    patches.set(library, "serialize_file", write_file)
    patches.set(library, "serialize", to_bytes)
    patches.set(library, "deserialize", FakeSafetensors)
    patches.set(library, "_view2torch", FakeSafetensors.get_tensors)
