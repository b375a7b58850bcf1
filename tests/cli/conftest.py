import pytest

from tests.interleave.little_search import search_little

little_search = pytest.fixture(autouse=True)(search_little)
