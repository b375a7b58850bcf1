"""Host memory of exactly the requested size that the GPU copies to and from directly (pinned memory)."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.numa.binding import place_memory
from ebbtide.numa.topology import binding_node, pci_address


def allocate_pinned(shape: tuple[int, ...], dtype: torch.dtype, node: int | None = None) -> torch.Tensor:
    """Allocate host memory and pin it; it is unpinned and freed with the tensor.

    torch rounds pinned memory up to a power of two. This memory is a mapping of its own, so its size is exact and no
    page is pinned twice.

    A forked process (a worker of a DataLoader, say) does not have the mapping. If it had it, the next write of this
    process would move the page (copy on write), while the GPU kept using the old one.

    Args:
        shape: The shape of the tensor; it has at least one element.
        dtype: The type of the elements.
        node: The NUMA node to take the memory from, if it has room; None: the kernel chooses.

    Raises:
        EngineError: If the memory cannot be pinned.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)
    memory = np.frombuffer(mapping, np.uint8)
    pointer = memory.ctypes.data
    # Registering touches every page, so the memory must be placed before.
    place_memory(pointer, nbytes, node)
    error = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))
    if error:
        _clear_last_error()
        raise EngineError(
            f"{nbytes} bytes of host memory cannot be pinned (CUDA error {error}): lower what other processes pin, "
            "raise the limit of locked memory (ulimit -l), or offload less"
        )
    unregister = weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, pointer)
    # The driver unpins everything at the exit. A forked process that exits must not call CUDA.
    unregister.atexit = False
    return torch.from_numpy(memory).view(dtype).view(shape)


def gpu_node(device: torch.device) -> int | None:
    """Return the NUMA node to take the pinned memory and the CPU threads of a GPU from.

    Args:
        device: The GPU, or the CPU.

    Returns:
        The node that the GPU is attached to. None, so that nothing is bound, for the CPU, on a host with one node, and
        where the node is not known.
    """
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_domain_id"):
        return None  # an older torch
    return binding_node(pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id))


def _clear_last_error() -> None:
    """Clear the last error of the CUDA runtime, which would otherwise be raised by the next kernel of the job."""
    # torch has no function for this, so it is called in the library that torch has loaded.
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart.so"):
            ctypes.CDLL(path).cudaGetLastError()
            return
