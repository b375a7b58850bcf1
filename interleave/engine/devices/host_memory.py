"""Pinned host memory of exactly the requested size.

The GPU copies to and from it directly.
"""

import contextlib
import ctypes
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ebbtide import host_limits
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.numa.binding import bind_thread, place_memory
from ebbtide.numa.topology import binding_node, pci_address

# Memory that a thread touches at once.
_CHUNK_BYTES = 64 << 20


def allocate_pinned(
    shape: tuple[int, ...], dtype: torch.dtype, node: int | None = None
) -> torch.Tensor:
    """Allocate host memory (an element at least), on the NUMA node if that has room,
    and pin it.

    It is unpinned and freed with the tensor. Raises EngineError if that fails.

    torch rounds pinned memory up to a power of two; a mapping has the exact size. A
    forked process does not have it: else the next write of this one would move the
    page, while the GPU kept using the old one.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)
    memory = np.frombuffer(mapping, np.uint8)
    pointer = memory.ctypes.data
    # Fewer pages to pin, and to look up in updates. A kernel without huge pages says
    # so.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # Touching a page takes it, so the memory must be placed before.
    place_memory(pointer, nbytes, node)
    _touch(memory, node)
    error = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))
    if error:
        _clear_last_error()
        raise EngineError(
            f"{nbytes} bytes of host memory cannot be pinned (CUDA error {error}): "
            "lower what other processes pin, "
            "raise the limit of locked memory (ulimit -l), or offload less"
        )
    unregister = weakref.finalize(
        memory, torch.cuda.cudart().cudaHostUnregister, pointer
    )
    # The driver unpins everything at the exit. A forked process that exits must not
    # call CUDA.
    unregister.atexit = False
    return torch.from_numpy(memory).view(dtype).view(shape)


def _touch(memory: npt.NDArray[np.uint8], node: int | None) -> None:
    """Take the pages of memory by the threads of this rank. Registering it alone would
    take them by one thread."""
    begins = range(0, len(memory), _CHUNK_BYTES)
    threads = min(len(begins), host_limits.rank_cores())
    with ThreadPoolExecutor(threads, initializer=bind_thread, initargs=(node,)) as pool:
        # NumPy releases the GIL.
        list(
            pool.map(
                lambda begin: memory[begin : begin + _CHUNK_BYTES : mmap.PAGESIZE].fill(
                    0
                ),
                begins,
            )
        )


def gpu_node(device: torch.device) -> int | None:
    """Return the NUMA node that a GPU is attached to.

    Its pinned memory and CPU threads are taken from there.

    None, so that nothing is bound, for the CPU, on a host with one node, and where the
    node is not known."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_domain_id"):
        return None  # an older torch
    return binding_node(
        pci_address(
            properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        )
    )


def _clear_last_error() -> None:
    """Clear the last error of the CUDA runtime.

    Otherwise the next kernel of the job would raise it.
    """
    # torch has no function for this, so it is called in the library that torch has
    # loaded.
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart.so"):
            ctypes.CDLL(path).cudaGetLastError()
            return
