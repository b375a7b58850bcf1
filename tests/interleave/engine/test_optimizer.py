"""InterleavedAdamW: the reference's bits, whatever the policy."""

from __future__ import annotations

import pytest
import torch

from ebbtide.interleave.engine.optimizer import InterleavedAdamW
from tests.interleave.engine.jobs import POLICIES, ReferenceAdamW, train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_references_bits(policy: str, dtype: torch.dtype) -> None:
    expected = train(ReferenceAdamW, dtype=dtype)
    assert len(set(expected.losses)) > 40
    found = train(lambda params: InterleavedAdamW(params, policy=policy, subgroup_params=1000), dtype=dtype)
    assert found == expected
