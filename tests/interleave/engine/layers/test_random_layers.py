"""Activations under random choices and budgets, weights streamed or not: the plain job's bits, within the budget."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from ebbtide.interleave.engine.errors import DeviceMemoryError
from ebbtide.interleave.engine.layers import activations, model_layers
from ebbtide.interleave.engine.layers.weights import stream_weights
from ebbtide.interleave.model.layers import ACTIVATION_KINDS
from tests.conftest import examples
from tests.interleave.engine.layers.random_jobs import CountingDevice, random_job, time_limit, watched
from tests.interleave.engine.layers.random_planner import RandomPlanner
from tests.interleave.engine.states import bits

# A case takes below one second; machines may be busy.
_CASE_S = 120.0
_RATES = (None, 2e6, 2e7)


def run_case(seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a random job under a random choice, or a random budget, and compare it with the plain one."""
    draw = random.Random(seed)
    forced = draw.random() < 0.7
    job = random_job(seed, same_length=forced)
    plain = job.model()
    expected = job.train(plain)
    model = job.model()
    device = CountingDevice(None, draw.choice(_RATES), draw.choice(_RATES))
    planner = RandomPlanner(draw)
    budget = 1e9 if forced else draw.choice((2e3, 8e3, 2e4, 4e4))
    with monkeypatch.context() as patched:
        if forced:
            patched.setattr(model_layers, "plan_orders", planner.plan)
        with (
            stream_weights(model, memory_budget=12e3, device=device)
            if draw.random() < 0.4
            else nullcontext() as streamed,
            activations.offload_activations(model, memory_budget=budget, device=device) as offloaded,
        ):
            planner.activations = offloaded
            try:
                actual = job.train(model, device)
                if not job.autocast:
                    # Casts that autocast keeps are no activations.
                    with watched(model, device) as live:
                        loss = model(torch.randint(0, 8, (9,))).sum()
                    assert max(live) <= offloaded.peak_bytes + (streamed.peak_bytes if streamed else 0)
                    loss.backward()
                    del loss
            except DeviceMemoryError:
                # What a plan does not count, and evicting kept tensors gives in most cases, but not in all: graphs that
                # are kept for a second backward, and casts of weights that recomputation makes again under autocast.
                assert not forced or job.twice or job.autocast, (seed, planner.kinds)
                return "error"
            finally:
                assert offloaded._transfers.memory.limit_bytes is not None
                assert offloaded.peak_bytes <= offloaded._transfers.memory.limit_bytes
            equal = [torch.equal(bits(one), bits(other)) for one, other in zip(actual, expected, strict=True)]
            assert all(equal), (seed, planner.kinds, equal)
            kinds = set(offloaded.choices.values())
            assert offloaded.used_bytes == 0, (seed, planner.kinds)
        return "+".join(sorted(kinds))


def test_offload_activations__keeps_no_copied_memory_of_a_pass_whose_backward_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All later passes keep everything.
    assert run_case(10594, monkeypatch) == "keep"


def test_time_limit__ends_a_case_whose_copies_never_end() -> None:
    device, released = CountingDevice(None, None, None), threading.Event()
    model = random_job(1, same_length=True).model()
    with activations.offload_activations(model, memory_budget=1e9, device=device, activations="offload"):
        # Imports of torch are not to be interrupted.
        model(torch.arange(9) % 8).sum().backward()
        device.submit("d2h", released.wait)
        with pytest.raises(TimeoutError, match="case 1 has not ended after 1 s"), time_limit(1.0, "case 1"):
            model(torch.arange(9) % 8).sum().backward()
        released.set()


@pytest.mark.parametrize("cases", [pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(14_400)]), 10])
def test_offload_activations__random_choices_have_the_bits_of_the_plain_job(
    cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: Counter[str] = Counter()
    for seed in range(examples(cases)):
        with time_limit(_CASE_S, f"case {seed}"):
            results[run_case(seed, monkeypatch)] += 1
    print(dict(results))
    assert results["error"] < cases / 4
    assert set(ACTIVATION_KINDS) <= {kind for result in results for kind in result.split("+")}
