"""A comparison that is made once for all tests here."""

from __future__ import annotations

import pytest

from ebbtide.interleave.experiments.compare.compare import Asked, compare
from ebbtide.interleave.experiments.compare.results import Comparison
from tests.conftest import torch_on_one_thread

TINY = 200_000
LINK = 5e8


one_thread = pytest.fixture(scope="package", autouse=True)(torch_on_one_thread)


@pytest.fixture(scope="package")
def found() -> Comparison:
    """All policies on an emulated device, and torch."""
    return compare(Asked(params=TINY, iterations=5, link_bytes_per_s=LINK, peers=("torch",)))
