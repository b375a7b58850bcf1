"""Activations under random choices, weights streamed or not: the live memory is within
what is counted."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from ebbtide.features.layers.engine import moving
from ebbtide.features.layers.model import ACTIVATION_KINDS
from ebbtide.interleave.engine.errors import DeviceMemoryError
from tests.conftest import examples
from tests.features.layers.live_memory import CountingDevice, watched
from tests.features.layers.random_planner import RandomPlanner
from tests.interleave.engine.grid.models import WIDTH, Net
from tests.interleave.engine.time_limit import time_limit

_KINDS = ("perceptron", "attention", "batch norm", "custom", "split")
_RATES = (None, 2e6, 2e7)
# The model hands a bias to its layers, which is none of their activations.
_BIAS_BYTES = 4 * WIDTH


def run_case(seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Watch passes of a random model under random choices, or a random budget; return
    the choices, or `error`."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(tuple(draw.choices(_KINDS, k=draw.randint(2, 5))))
    device, planner = (
        CountingDevice(None, draw.choice(_RATES), draw.choice(_RATES)),
        RandomPlanner(draw),
    )
    is_forced, is_streamed = draw.random() < 0.7, draw.random() < 0.4
    own = random.Random(f"moving {seed}")
    model.layers[: own.randrange(len(model.layers))].requires_grad_(own.random() < 0.7)
    weights = (
        f"streamed:{own.randint(1, len(model.layers))}"
        if own.random() < 0.4
        else "auto"
    )
    budget = 1e9 if is_forced else draw.choice((2e3, 8e3, 2e4))
    with monkeypatch.context() as patched:
        if is_forced:
            patched.setattr(moving, "plan_orders", planner.plan)
        with (
            moving.stream_weights(
                model, weights=weights, memory_budget=12e3, device=device
            )
            if is_streamed
            else nullcontext(),
            moving.offload_activations(
                model, memory_budget=budget, device=device
            ) as offloaded,
        ):
            planner.moved = offloaded
            try:
                for _ in range(4):
                    model(torch.arange(9)).backward()
                with watched(model, device) as live:
                    loss = model(torch.arange(9))
                loss.backward()
            except DeviceMemoryError:
                assert not is_forced, (seed, planner.kinds)
                return "error"
            assert max(live) <= offloaded.peak_bytes + _BIAS_BYTES, (
                seed,
                planner.kinds,
            )
            assert offloaded.peak_bytes <= offloaded._mover.transfers.memory.limit_bytes
            assert offloaded.used_bytes == 0, (seed, planner.kinds)
            return "+".join(sorted(set(offloaded.choices.values())))


def test_time_limit__ends_a_case_whose_copies_never_end() -> None:
    device, released = CountingDevice(None, None, None), threading.Event()
    model = Net(("perceptron", "attention"))
    with moving.offload_activations(
        model, memory_budget=1e9, device=device, activations="offload"
    ):
        # Imports of torch are not to be interrupted.
        model(torch.arange(9)).backward()
        device.submit("d2h", released.wait)
        with (
            pytest.raises(TimeoutError, match="case 1 has not ended after 1 s"),
            time_limit(1.0, "case 1"),
        ):
            model(torch.arange(9)).backward()
        released.set()


@pytest.mark.slow
def test_offload_activations__live_memory_is_within_what_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results: Counter[str] = Counter()
    for seed in range(examples(200, by_default=12)):
        results[run_case(seed, monkeypatch)] += 1
    print(dict(results))
    assert results["error"] < results.total() / 4
    assert set(ACTIVATION_KINDS) <= {
        kind for result in results for kind in result.split("+")
    }
