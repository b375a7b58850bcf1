"""The rates at which a GPU computes: peaks of its data sheet, for the times of a dry run."""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from ebbtide.json_files import number_range

PeakFlops = Annotated[float, number_range(1e9, 1e18)]
MemoryRate = Annotated[float, number_range(1e9, 1e15)]


@dataclass(frozen=True)
class GpuCompute:
    """Peak rates of a GPU; None is not known."""

    name: Annotated[str, Meta(description="a text")] | None = None  # Its name, as torch reports it.
    # As in "9.0"; None for GPUs without one.
    compute_capability: Annotated[str, Meta(pattern=r"^\d+\.\d+$", description='a text as in "9.0"')] | None = None
    # Peak of dense matrix products by type: `float32`, `tf32`, `float16`, `bfloat16`, `float8`.
    flops_per_s: dict[str, PeakFlops] = field(default_factory=dict, hash=False)
    memory_bytes_per_s: MemoryRate | None = None  # Traffic with device memory.
    # Copies to other GPUs of its box, in one direction (NVLink, or PCIe where there is none).
    peer_bytes_per_s: MemoryRate | None = None
