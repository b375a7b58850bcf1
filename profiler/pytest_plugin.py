"""The pytest plugin of ebbtide. Nothing but pytest is loaded before a test asks for a
fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def memory_limit() -> Callable[..., Any]:
    """Return `ebbtide.profiler.memory_limit`.

    Use it as in `with memory_limit("20GB"): step()`.
    """
    from ebbtide.profiler import memory_limit

    return memory_limit
