"""Jobs beyond the plain loop: each trains as with DeepSpeed itself, and the same under
every policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import slow

from .training import batches, config, digest, engine, loss_of, train

TWO = ("zero-offload", "interleaved:2,overlap=forward")


def all_equal(results: dict[str, Any]) -> bool:
    return len({str(result) for result in results.values()}) == 1


def test_step__skips_gradients_that_are_not_finite(deepspeed: Any) -> None:
    """The step is skipped and counted if DeepSpeed does so (in bf16 from 0.19.8 on),
    and it changes nothing."""
    results, skipped = {}, {}
    for policy in (None, *TWO):
        with engine(policy, config("bf16")) as running:
            train(running, 2)
            before = digest(running)
            for batch in batches(running, 1, seed=3):
                running.backward(loss_of(running, batch) * float("inf"))
                running.step()
            skipped[policy] = running.skipped_steps
            assert (digest(running) == before) == bool(running.skipped_steps)
            train(running, 2, seed=4)
            results[policy] = digest(running)
    assert all_equal(skipped)
    assert results[TWO[0]] == results[TWO[1]]
    with engine("zero-offload", config("bf16")) as running:
        train(running, 2)
        train(running, 2, seed=4)
        assert (digest(running) == results[TWO[0]]) == bool(skipped[None])


@contextlib.contextmanager
def half_precision(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enable fp16, which DeepSpeed's CPU accelerator reports as unsupported but torch's
    CPU kernels support."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    with patch.context() as changed:
        changed.setattr(kind, "is_fp16_supported", lambda self: True)
        changed.setattr(
            kind,
            "supported_dtypes",
            lambda self: [torch.float, torch.half, torch.bfloat16],
        )
        yield


def test_loss_scale__skips_the_same_steps_as_deepspeed(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scales overflow, so that steps are skipped until one fits; as many as
    in DeepSpeed."""
    results = {}
    settings = {
        **config("bf16"),
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
    }
    del settings["bf16"]
    with half_precision(monkeypatch):
        for policy in (None, *TWO):
            with engine(policy, settings) as running:
                train(running, 14)
                results[policy] = (
                    running.skipped_steps,
                    running.optimizer.loss_scale,
                    digest(running),
                )
    assert results[None][:2] == results[TWO[0]][:2]
    assert 0 < results[None][0] < 14
    assert results[TWO[0]] == results[TWO[1]]


def test_safe_get_and_set__work_at_any_time(deepspeed: Any) -> None:
    """Masters, gradients and moments are read and set by the functions of DeepSpeed."""
    from deepspeed import utils

    results: dict[Any, Any] = {}
    for policy in (None, "twin-flow:0.5", "interleaved:2,overlap=forward"):
        with engine(policy, config("bf16", 2)) as running:
            readings = []
            train(running, 2)
            param = running.module.blocks[1][0].weight
            for micro_step, batch in enumerate(batches(running, 4, seed=6)):
                running.backward(loss_of(running, batch))
                if micro_step == 1:
                    gradient = utils.safe_get_full_grad(param)
                    readings += [
                        gradient.clone(),
                        utils.safe_get_full_fp32_param(param).clone(),
                    ]
                    utils.safe_set_full_grad(param, torch.zeros_like(gradient))
                    assert not utils.safe_get_full_grad(param).any()
                running.step()
                if micro_step == 1:
                    readings.append(
                        utils.safe_get_full_optimizer_state(param, "exp_avg_sq").clone()
                    )
            utils.safe_set_full_fp32_param(param, torch.full_like(gradient, 0.25))
            assert bool((utils.safe_get_full_fp32_param(param) == 0.25).all())
            train(running, 1, seed=8)
            results[policy] = readings, digest(running)
    for theirs, ours in zip(
        results[None][0], results["interleaved:2,overlap=forward"][0], strict=True
    ):
        assert torch.allclose(theirs, ours, rtol=1e-5, atol=1e-7)
    assert results["twin-flow:0.5"][1] == results["interleaved:2,overlap=forward"][1]


@pytest.mark.slow
def test_zero_grad__drops_gradients(deepspeed: Any) -> None:
    """After zero_grad instead of a step, only the gradients of the next backward
    count."""
    results: dict[Any, Any] = {}
    for dropped in (False, True):
        with engine(TWO[1], config("bf16")) as running:
            train(running, 2)
            if dropped:
                for batch in batches(running, 1, seed=3):
                    running.backward(loss_of(running, batch))
                    running.optimizer.zero_grad()
            train(running, 2, seed=5)
            results[dropped] = digest(running)
    assert all_equal(results)


@pytest.mark.parametrize(
    "kind",
    slow(
        ["torch's backward", "reentrant checkpointing", "the user's boundary"],
        but=["the user's boundary"],
    ),
)
def test_other_training_loops__train_as_with_deepspeed(
    deepspeed: Any, kind: str
) -> None:
    """Losses are those of DeepSpeed: the first two with the same bits, the others
    within rounding."""
    results, losses = {}, {}
    settings = config("bf16", 2 if kind == "the user's boundary" else 1)
    if kind == "the user's boundary":
        settings["managed_gradient_accumulation"] = False
    for policy in (None, *TWO):
        with engine(
            policy, settings, checkpointing=kind == "reentrant checkpointing"
        ) as running:
            step_losses = []
            for step, batch in enumerate(batches(running, 6)):
                x = batch[0].requires_grad_(kind == "reentrant checkpointing")
                loss = loss_of(running, (x, batch[1]))
                loss.backward() if kind == "torch's backward" else running.backward(
                    loss
                )
                if kind != "the user's boundary" or step % 2:
                    running.step()
                step_losses.append(loss.item())
            results[policy], losses[policy] = digest(running), step_losses
    assert results[TWO[0]] == results[TWO[1]]
    assert losses[None] == pytest.approx(losses[TWO[0]], abs=2e-3)
    assert losses[None][:2] == losses[TWO[0]][:2]


@pytest.mark.slow
def test_unused_parameters__have_a_gradient_of_zero(deepspeed: Any) -> None:
    """A step that does not use a parameter updates it with a gradient of zero."""
    results = {}
    for policy in TWO:
        with engine(policy, config("bf16")) as running:
            train(running, 2)
            kept = running.module.blocks
            running.module.blocks = torch.nn.ModuleList(kept[:2])
            train(running, 2, seed=3)
            running.module.blocks = kept
            train(running, 1, seed=4)
            results[policy] = digest(running)
    assert all_equal(results)
