"""Lets plans be made quickly, for tests that do not depend on how good a plan is."""

from functools import lru_cache

import pytest

from ebbtide.features.layers import layer_choice
from ebbtide.features.storage.engine import speed
from ebbtide.interleave.policies.search import best_plan

_OPS = 1000
# Plans are remembered from test to test, and only by tests that plan quickly.
_search_quickly = lru_cache(maxsize=1000)(best_plan.search_plan.__wrapped__)


def plan_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let planners search little, and measure drives with little data, while patches last; to be made a fixture."""
    monkeypatch.setattr(layer_choice, "_SEARCHED_OPS", 3 * _OPS)
    monkeypatch.setattr(best_plan, "_MAX_OPS", _OPS)
    monkeypatch.setattr(best_plan, "search_plan", _search_quickly)
    # In place of 32 MiB, of which a measurement moves 16.
    monkeypatch.setattr(speed, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(speed, "_PROBED_BYTES", 2 << 20)
