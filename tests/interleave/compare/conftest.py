"""A comparison that runs once for all tests of this folder."""

from __future__ import annotations

import pytest

from ebbtide import seams
from ebbtide.interleave.compare.compare import CompareConfig, compare
from ebbtide.interleave.compare.results import Comparison
from tests.conftest import torch_on_one_thread
from tests.interleave.quick_plans import plan_quickly

TINY = 200_000
LINK = 5e8


one_thread = pytest.fixture(scope="package", autouse=True)(torch_on_one_thread)
quick_plans = pytest.fixture(autouse=True)(plan_quickly)


@pytest.fixture(scope="package")
def comparison() -> Comparison:
    """Compare all policies on an emulated device, and torch."""
    if seams.find_service("measure-cpu") is None:
        pytest.skip("a feature measures the rates of the CPU")
    with pytest.MonkeyPatch.context() as patch:
        plan_quickly(patch)
        return compare(
            CompareConfig(
                params=TINY, iterations=5, link_bytes_per_s=LINK, baselines=("torch",)
            )
        )
