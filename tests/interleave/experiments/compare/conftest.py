"""A comparison that runs once for all tests of this folder."""

from __future__ import annotations

import pytest

from ebbtide.interleave.experiments.compare.compare import CompareConfig, compare
from ebbtide.interleave.experiments.compare.results import Comparison
from tests.conftest import torch_on_one_thread
from tests.interleave.little_search import search_little

TINY = 200_000
LINK = 5e8


one_thread = pytest.fixture(scope="package", autouse=True)(torch_on_one_thread)
little_search = pytest.fixture(autouse=True)(search_little)


@pytest.fixture(scope="package")
def comparison() -> Comparison:
    """Compare all policies on an emulated device, and torch."""
    with pytest.MonkeyPatch.context() as patch:
        search_little(patch)
        return compare(CompareConfig(params=TINY, iterations=5, link_bytes_per_s=LINK, baselines=("torch",)))
