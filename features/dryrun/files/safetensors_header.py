"""The header of a safetensors file, for tensors that are not written."""

import json
from typing import Any

# Data types by their names in a file.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def header_of(tensors: dict[str, Any], metadata: dict[str, str] | None) -> bytes:
    """Return the beginning of a safetensors file: the length of the header, and the
    header."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        offsets = [offset, offset + size]
        entries[name] = {
            "dtype": names[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        offset += size
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header
