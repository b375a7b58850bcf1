"""What jobs do beyond the plain loop: each goes as with DeepSpeed itself, and alike under every policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .training import batches, config, digest, engine, loss_of, train

TWO = ("zero-offload", "interleaved:2")


def alike(found: dict[str, Any]) -> bool:
    return len({str(result) for result in found.values()}) == 1


def test_a_gradient_that_is_not_finite(deepspeed: Any) -> None:
    """The step is left out and counted where DeepSpeed does so (in bf16 from 0.19.8 on), and nothing changes by it."""
    found, skipped = {}, {}
    for policy in (None, *TWO):
        with engine(policy, config("bf16")) as made:
            train(made, 2)
            before = digest(made)
            for batch in batches(made, 1, seed=3):
                made.backward(loss_of(made, batch) * float("inf"))
                made.step()
            skipped[policy] = made.skipped_steps
            assert (digest(made) == before) == bool(made.skipped_steps)
            train(made, 2, seed=4)
            found[policy] = digest(made)
    assert alike(skipped)
    assert found[TWO[0]] == found[TWO[1]]
    with engine("zero-offload", config("bf16")) as made:
        train(made, 2)
        train(made, 2, seed=4)
        assert (digest(made) == found[TWO[0]]) == bool(skipped[None])


@contextlib.contextmanager
def half_precision(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepSpeed's CPU accelerator says that it has no fp16; torch's CPU kernels have."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    with patch.context() as changed:
        changed.setattr(kind, "is_fp16_supported", lambda self: True)
        changed.setattr(kind, "supported_dtypes", lambda self: [torch.float, torch.half, torch.bfloat16])
        yield


def test_loss_scaling(deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scales overflow, so that steps are left out until one fits; as many as DeepSpeed leaves out."""
    found = {}
    settings = {**config("bf16"), "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    del settings["bf16"]
    with half_precision(monkeypatch):
        for policy in (None, *TWO):
            with engine(policy, settings) as made:
                train(made, 14)
                found[policy] = made.skipped_steps, made.optimizer.loss_scale, digest(made)
    assert found[None][:2] == found[TWO[0]][:2]
    assert 0 < found[None][0] < 14
    assert found[TWO[0]] == found[TWO[1]]


def test_masters_gradients_and_moments_can_be_read_and_set(deepspeed: Any) -> None:
    """At any time, by DeepSpeed's own functions."""
    from deepspeed import utils

    found: dict[Any, Any] = {}
    for policy in (None, "twin-flow:0.5", "interleaved:2"):
        with engine(policy, config("bf16", 2)) as made:
            seen = []
            train(made, 2)
            param = made.module.blocks[1][0].weight
            for micro_step, batch in enumerate(batches(made, 4, seed=6)):
                made.backward(loss_of(made, batch))
                if micro_step == 1:
                    gradient = utils.safe_get_full_grad(param)
                    seen += [gradient.clone(), utils.safe_get_full_fp32_param(param).clone()]
                    utils.safe_set_full_grad(param, torch.zeros_like(gradient))
                    assert not utils.safe_get_full_grad(param).any()
                made.step()
                if micro_step == 1:
                    seen.append(utils.safe_get_full_optimizer_state(param, "exp_avg_sq").clone())
            utils.safe_set_full_fp32_param(param, torch.full_like(gradient, 0.25))
            assert bool((utils.safe_get_full_fp32_param(param) == 0.25).all())
            train(made, 1, seed=8)
            found[policy] = seen, digest(made)
    for theirs, ours in zip(found[None][0], found["interleaved:2"][0], strict=True):
        assert torch.allclose(theirs, ours, rtol=1e-5, atol=1e-7)
    assert found["twin-flow:0.5"][1] == found["interleaved:2"][1]


def test_gradients_that_are_thrown_away(deepspeed: Any) -> None:
    """zero_grad instead of a step: the next backward's gradients are all there is."""
    found = {}
    for policy in TWO:
        for thrown in (False, True):
            with engine(policy, config("bf16")) as made:
                train(made, 2)
                if thrown:
                    for batch in batches(made, 1, seed=3):
                        made.backward(loss_of(made, batch))
                        made.optimizer.zero_grad()
                train(made, 2, seed=5)
                found[policy, thrown] = digest(made)
    assert alike(found)


@pytest.mark.parametrize("kind", ["torch's backward", "reentrant checkpointing", "the user's boundary"])
def test_other_ways_to_train(deepspeed: Any, kind: str) -> None:
    """As DeepSpeed does: losses to the bit where it is only about gradients."""
    found, losses = {}, {}
    settings = config("bf16", 2 if kind == "the user's boundary" else 1)
    if kind == "the user's boundary":
        settings["managed_gradient_accumulation"] = False
    for policy in (None, *TWO):
        with engine(policy, settings, checkpointing=kind == "reentrant checkpointing") as made:
            told = []
            for step, batch in enumerate(batches(made, 6)):
                x = batch[0].requires_grad_(kind == "reentrant checkpointing")
                loss = loss_of(made, (x, batch[1]))
                loss.backward() if kind == "torch's backward" else made.backward(loss)
                if kind != "the user's boundary" or step % 2:
                    made.step()
                told.append(loss.item())
            found[policy], losses[policy] = digest(made), told
    assert found[TWO[0]] == found[TWO[1]]
    assert losses[None] == pytest.approx(losses[TWO[0]], abs=2e-3)
    assert losses[None][:2] == losses[TWO[0]][:2]


def test_parameters_that_a_step_does_not_use(deepspeed: Any) -> None:
    """Their gradient is zero."""
    found = {}
    for policy in TWO:
        with engine(policy, config("bf16")) as made:
            train(made, 2)
            kept = made.module.blocks
            made.module.blocks = torch.nn.ModuleList(kept[:2])
            train(made, 2, seed=3)
            made.module.blocks = kept
            train(made, 1, seed=4)
            found[policy] = digest(made)
    assert alike(found)
