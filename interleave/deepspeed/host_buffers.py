"""Masters and moments of DeepSpeed as views of host buffers."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from ebbtide.interleave.engine.runtime.state_rows import EXP_AVG, EXP_AVG_SQ, MASTER

_MOMENTS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}


def release_pages(zeros: torch.Tensor) -> None:
    """Return the memory of zeros on the host, which is not pinned, to the system until something writes to it."""
    if zeros.device.type != "cpu":
        return
    begin, end = zeros.data_ptr(), zeros.data_ptr() + zeros.nbytes
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    if end - first >= mmap.PAGESIZE:
        nbytes = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def use_host_buffer(optimizer: Any, master: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Make a master and its moments views of a host buffer with their values, and return it. New moments are zero.

    Args:
        optimizer: The optimizer that DeepSpeed calls, which has the moments.
        master: The master.
        buffer: Shape (3, elements of the master), fp32.
    """
    if master.data.data_ptr() != buffer[MASTER].data_ptr():
        buffer[MASTER].copy_(master.data)
    state = optimizer.state[master]
    for name, row in _MOMENTS.items():
        if name not in state:
            buffer[row].zero_()
        elif state[name].data_ptr() != buffer[row].data_ptr():
            buffer[row].copy_(state[name])
    return bind(optimizer, master, buffer)


def bind(optimizer: Any, master: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Make a master and its moments views of a host buffer, whose values they take, and return it.

    Args:
        optimizer: As for `use_host_buffer`.
        master: As for `use_host_buffer`.
        buffer: Shape (3, elements), fp32; elements may be 0.
    """
    master.data = buffer[MASTER]
    master.grad = None
    state = optimizer.state[master]
    for name, row in _MOMENTS.items():
        state[name] = buffer[row]
    state.setdefault("step", 0)
    return buffer
