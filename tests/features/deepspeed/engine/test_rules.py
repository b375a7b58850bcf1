"""Rules that DeepSpeed's configuration names, besides AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.interleave.engine.rules.rule import UpdateRange
from tests import torch_extensions
from tests.conftest import FUZZ, slow_case

from .training import (
    config,
    digest,
    engine,
    masters,
    state,
    step_beside_deepspeed,
    train,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {
        "type": "Adam",
        "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False},
    },
    "adam-torch": {
        "type": "Adam",
        "params": {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "adam_w_mode": False,
            "torch_adam": True,
        },
    },
    "adamw-torch": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True},
    },
    "lion": {
        "type": "Lion",
        "params": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
    },
    "muon": {
        "type": "Muon",
        "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1},
    },
}
# DeepSpeed compiles its CPU Lion for most of a minute.
NAMES = pytest.mark.parametrize(
    "name", ["adam", *map(slow_case, ("adam-torch", "lion"))]
)


def settings(name: str, **changes: Any) -> dict[str, Any]:
    if name == "lion":
        torch_extensions.compile_extensions(builders=("CPULionBuilder",))
    return config("bf16", optimizer=OPTIMIZERS[name], **changes)


def check_updates(running: Any, name: str) -> list[int]:
    """Compare each update on the CPU with that of the reference, and return a list that
    gets their elements."""
    kernel, sizes = running.optimizer._runner.kernel, []
    update = kernel.update_ranges

    def checked(
        gradient: Any, rows: Any, out: Any, ranges: Any, share: float, rule: Any
    ) -> None:
        parts = [UpdateRange(*each) for each in ranges]
        expected = [row.clone() for row in rows]
        for part in parts:
            own = slice(part.begin, part.end)
            reference.update(
                gradient[own],
                [row[own] for row in expected],
                None,
                part.scalars,
                find_rule(name),
            )
        update(gradient, rows, out, parts, share, rule)
        assert all(
            torch.equal(row, other) for row, other in zip(rows, expected, strict=True)
        )
        sizes.append(sum(part.end - part.begin for part in parts))

    kernel.update_ranges = checked
    return sizes


@NAMES
def test_policies__give_the_bits_of_the_reference(
    deepspeed: Any, name: str, tmp_path: Any
) -> None:
    results = {}
    others = ("interleaved:2", "pipelined,overlap=forward") if FUZZ > 1 else ()
    for policy in ("zero-offload", *others, "adaptive"):
        storage = {"storage": tmp_path} if policy == "adaptive" else {}
        with engine(policy, settings(name), **storage) as running:
            sizes = (
                check_updates(running, name.partition("-")[0])
                if policy == "zero-offload"
                else [1]
            )
            losses = train(running, 3)
            assert sum(sizes)
            results[policy] = digest(running), losses
            assert len(state(running)) % (3 if name == "lion" else 4) == 0
    assert len({str(result) for result in results.values()}) == 1, results


@pytest.mark.parametrize("name", ["adam", *map(slow_case, ("adamw-torch", "lion"))])
def test_step__is_that_of_deepspeed_within_four_ulp(
    deepspeed: Any, name: str, tmp_path: Any
) -> None:
    """From one checkpoint of plain DeepSpeed, and back into it."""
    own = settings(name)
    step = step_beside_deepspeed(own, 4, tmp_path)
    # The sign of Lion's sum is that of rounding where it cancels; DeepSpeed gives a
    # zero a sign.
    assert step.is_apart.float().mean() <= (1e-3 if name == "lion" else 0)
    with engine(None, own, seed=6) as plain:
        plain.load_checkpoint(tmp_path, tag="driven")
        assert torch.equal(masters(plain), step.ours)
        assert name == "lion" or digest(plain) == step.digest
