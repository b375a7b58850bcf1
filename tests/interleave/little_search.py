"""Lets planners search little, for tests that do not depend on how good a plan is."""

from functools import lru_cache

import pytest

from ebbtide.interleave.policies import layer_choice
from ebbtide.interleave.policies.search import best_plan

_OPS = 1000


def search_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches simulate few operations while patches last; to be made a fixture."""
    monkeypatch.setattr(layer_choice, "_SEARCHED_OPS", 3 * _OPS)
    for name in ("_PLACEMENT_OPS", "_ASSIGNMENT_OPS", "_SLOWER_OPS", "_OPS_BESIDE_LAYERS"):
        monkeypatch.setattr(best_plan, name, _OPS)
    # Other tests find none of these plans.
    monkeypatch.setattr(best_plan, "search_plan", lru_cache(best_plan.search_plan.__wrapped__))
