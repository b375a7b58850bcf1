import pytest

from tests.conftest import torch_on_one_thread

one_thread = pytest.fixture(scope="session", autouse=True)(torch_on_one_thread)
