"""DeepSpeed's ZeRO-3 driven by each policy: the same bits, and one step is its CPU Adam's to a few ulp."""

from typing import Any

import pytest
import torch

from .training import config, digest, engine, train

SOME = ("zero-offload", "interleaved:2", "adaptive")
ALL = (*SOME, "twin-flow:0.5", "pipelined", "gpu-only")
STEPS = 4


@pytest.mark.parametrize(
    ("policies", "dtype", "accumulate", "more"),
    [
        (ALL, "bf16", 2, {}),
        pytest.param(SOME, "bf16", 1, {"data_types": {"grad_accum_dtype": "fp32"}}, marks=pytest.mark.slow),
        (SOME, "bf16", 2, {"data_types": {"grad_accum_dtype": "fp32"}}),
        (SOME, "fp32", 1, {"gradient_clipping": 0.0, "zero": {"sub_group_size": 1_000_000_000}}),
        (SOME, "fp32", 2, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    ],
)
def test_every_policy_gives_the_same_bits(
    deepspeed: Any, policies: tuple[str, ...], dtype: str, accumulate: int, more: dict[str, Any]
) -> None:
    found = {}
    for policy in policies:
        with engine(policy, config(dtype, accumulate, **more)) as made:
            losses = train(made, STEPS)
            found[policy] = digest(made), losses
            assert made.optimizer.last_schedule is not None
    assert len({str(result) for result in found.values()}) == 1, found


@pytest.mark.parametrize(("dtype", "accumulate", "steps"), [("bf16", 2, 4), ("fp32", 1, 25), ("bf16", 1, 12)])
def test_one_step_is_deepspeeds_to_four_ulp(
    deepspeed: Any, dtype: str, accumulate: int, steps: int, tmp_path: Any
) -> None:
    """From one checkpoint, by the same gradients: DeepSpeed that loads it and ours."""
    settings = config(dtype, accumulate)
    with engine(None, settings) as before:
        train(before, steps)
        before.save_checkpoint(tmp_path, tag="plain")
    found = {}
    for policy in (None, "interleaved:2"):
        with engine(policy, settings, seed=5) as made:
            made.load_checkpoint(tmp_path, tag="plain")
            train(made, 1, seed=9)
            found[policy] = torch.cat([m.detach().clone() for m in made.optimizer.fp32_partitioned_groups_flat])
            lr = made.get_lr()[0]
    theirs, ours = found.values()
    size = torch.maximum(theirs.abs(), torch.tensor(lr))
    ulp = torch.nextafter(size, torch.tensor(torch.inf)) - size
    assert bool(((ours - theirs).abs() <= 4 * ulp).all())
    assert not torch.equal(ours, theirs)


def test_losses_run_beside_deepspeeds(deepspeed: Any) -> None:
    """Two implementations of AdamW part slowly."""
    losses = []
    for policy in (None, "adaptive"):
        with engine(policy, config("fp32")) as made:
            losses.append(train(made, 20))
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert losses[0][-1] != losses[0][0]
