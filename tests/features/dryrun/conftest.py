import pytest

from tests.conftest import hide_process_group

no_process_group = pytest.fixture(scope="module", autouse=True)(hide_process_group)
