"""A comparison that is made once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ebbtide.interleave.compare.compare import Asked, compare
from ebbtide.interleave.compare.results import Comparison

TINY = 200_000
LINK = 5e8


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny model is quicker so, above all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def found() -> Comparison:
    """All policies on an emulated device, and torch."""
    return compare(Asked(params=TINY, iterations=5, link_bytes_per_s=LINK, peers=("torch",)))
