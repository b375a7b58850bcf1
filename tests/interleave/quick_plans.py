"""Lets plans be made quickly, for tests that do not depend on how good a plan is."""

from functools import lru_cache
from importlib.util import find_spec

import pytest

from ebbtide.interleave.policies.search import best_plan

_OPS = 1000
_LESS_OF_FEATURES = {
    ("layers", "layer_choice._SEARCHED_OPS"): 3 * _OPS,
    # In place of 32 MiB, of which a measurement moves 16.
    ("storage", "engine.speed.PIECE_BYTES"): 1 << 20,
    ("storage", "engine.speed._PROBED_BYTES"): 2 << 20,
}
# Plans are remembered from test to test, and only by tests that plan quickly.
_search_quickly = lru_cache(maxsize=1000)(best_plan.search_plan.__wrapped__)


def plan_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let planners search little, and measure drives with little data, while patches
    last; to be made a fixture."""
    monkeypatch.setattr(best_plan, "_MAX_OPS", _OPS)
    monkeypatch.setattr(best_plan, "search_plan", _search_quickly)
    for (feature, name), value in _LESS_OF_FEATURES.items():
        if find_spec(f"ebbtide.features.{feature}"):
            monkeypatch.setattr(f"ebbtide.features.{feature}.{name}", value)
