"""ZeRO-3 driven by each policy: the same bits, and one step equals that of DeepSpeed's
CPU Adam within a few ulp."""

from typing import Any

import pytest
import torch

from tests.conftest import slow_case

from .training import config, digest, engine, step_beside_deepspeed, train

SOME = ("zero-offload", "interleaved:2", "adaptive")
ALL = (*SOME, "twin-flow:0.5", "pipelined,overlap=forward", "gpu-only")
STEPS = 4


@pytest.mark.parametrize(
    ("policies", "dtype", "accumulate", "changes"),
    [
        (ALL, "bf16", 2, {}),
        slow_case(SOME, "bf16", 1, {"data_types": {"grad_accum_dtype": "fp32"}}),
        slow_case(SOME, "bf16", 2, {"data_types": {"grad_accum_dtype": "fp32"}}),
        slow_case(
            SOME,
            "fp32",
            1,
            {"gradient_clipping": 0.0, "zero": {"sub_group_size": 1_000_000_000}},
        ),
        slow_case(
            SOME, "fp32", 2, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        ),
    ],
)
def test_policies__give_the_same_bits(
    deepspeed: Any,
    policies: tuple[str, ...],
    dtype: str,
    accumulate: int,
    changes: dict[str, Any],
) -> None:
    results = {}
    for policy in policies:
        with engine(policy, config(dtype, accumulate, **changes)) as running:
            losses = train(running, STEPS)
            results[policy] = digest(running), losses
            assert running.optimizer.last_schedule is not None
    assert len({str(result) for result in results.values()}) == 1, results


@pytest.mark.parametrize(
    ("dtype", "accumulate", "steps"),
    [("bf16", 2, 4), slow_case("fp32", 1, 25), slow_case("bf16", 1, 12)],
)
def test_step__is_that_of_deepspeed_within_four_ulp(
    deepspeed: Any, dtype: str, accumulate: int, steps: int, tmp_path: Any
) -> None:
    """From one checkpoint and with the same gradients, in plain DeepSpeed and in
    ebbtide."""
    step = step_beside_deepspeed(config(dtype, accumulate), steps, tmp_path)
    assert not bool(step.is_apart.any())
    assert not torch.equal(step.ours, step.theirs)
