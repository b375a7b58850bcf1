import pytest

from tests.interleave.quick_plans import plan_quickly

quick_plans = pytest.fixture(autouse=True)(plan_quickly)
