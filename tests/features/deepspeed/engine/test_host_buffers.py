"""Memory of DeepSpeed's own buffers beside those of ebbtide."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch

from ebbtide.features.deepspeed.engine.subgroup_slices import release_pages
from tests.features.deepspeed.engine.training import config, engine


def resident_pages(tensor: torch.Tensor) -> int:
    """Return how many of the whole pages of a tensor are resident."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE
    resident = (ctypes.c_ubyte * count)()
    assert (
        ctypes.CDLL(None).mincore(
            ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE), resident
        )
        == 0
    )
    return sum(page & 1 for page in resident)


@pytest.mark.parametrize("elements", [1, 5000, 3_000_001])
def test_release_pages__keeps_zeros_and_takes_values_again(elements: int) -> None:
    zeros = torch.zeros(elements)
    around = zeros[1:-1] if elements > 2 else zeros
    zeros[0], zeros[-1] = 1.0, 1.0
    release_pages(around)
    assert elements < 10_000 or resident_pages(around) == 0
    around += 2.0
    assert zeros.double().sum() == 2.0 * len(around) + (2 if elements > 2 else 1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_engine__has_no_memory_for_gradients_of_deepspeed_without_accumulation(
    deepspeed: Any, accumulate: int
) -> None:
    settings = config("bf16", accumulate)
    settings["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    with engine("zero-offload", settings) as running:
        optimizer = running.optimizer
        assert optimizer.offload_optimizer_pin_memory == (accumulate > 1)
        assert bool(resident_pages(optimizer.grad_partitions_flat_buffer)) == (
            accumulate > 1
        )
