"""Kinds and names of GPU work, as in traces of torch's profiler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ebbtide.profiler.gpu_activities.kinds import COMMUNICATION, KINDS, TRANSFER, kind_of

COMPUTE, COPY, MEMSET = (KINDS.index(kind) for kind in ("compute", "copy", "memset"))
MEMSET_NAME = "Memset (Device)"
HOST_TO_DEVICE, DEVICE_TO_HOST, ON_DEVICE = "HtoD", "DtoH", "DtoD"


def copy_kind(direction: str) -> int:
    """Return the kind of a copy. direction: HOST_TO_DEVICE, DEVICE_TO_HOST or ON_DEVICE (also between devices)."""
    return COPY if direction == ON_DEVICE else TRANSFER


def copy_name(direction: str, host_memory: str | None, unified: bool = False) -> str:
    """Return the name of a copy.

    Args:
        direction: HOST_TO_DEVICE, DEVICE_TO_HOST or ON_DEVICE.
        host_memory: `Pinned` or `Pageable`; None where not recorded.
        unified: Whether the driver moved pages of unified memory.
    """
    name = f"Memcpy {direction}"
    if unified:
        return f"{name} (Unified)"
    if direction == ON_DEVICE or host_memory is None:
        return name
    ends = ("Device", host_memory) if direction == DEVICE_TO_HOST else (host_memory, "Device")
    return f"{name} ({' -> '.join(ends)})"


def separate_collectives(work: pd.DataFrame, names: Sequence[str]) -> None:
    """Give the kernels of NCCL and RCCL their kind. work: columns `kind` and `name`, a position in names."""
    collective = np.array([kind_of("kernel", name) == COMMUNICATION for name in names], bool)
    if len(work):
        work.loc[(work["kind"] == COMPUTE) & collective[work["name"]], "kind"] = COMMUNICATION
