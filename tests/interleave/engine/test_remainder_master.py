"""InterleavedAdamW with masters as remainders: the bits of its reference, checkpoints, edits and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics import remainder
from ebbtide.interleave.engine.numerics.norm import sum_of_squares, total
from ebbtide.interleave.engine.numerics.reference import Hyper
from ebbtide.interleave.engine.optimizer import InterleavedAdamW
from tests.conftest import examples
from tests.interleave.engine.states import bits
from tests.interleave.engine.training import MACHINE

POLICIES = ("pipelined", "interleaved:2", "interleaved:3@0.5", "adaptive", "gpu-only", "zero-offload", "twin-flow:0.5")


class ReferenceJob:
    """Parameters that the reference updates, with gradients from a generator."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.params = [torch.randn(length, generator=generator).bfloat16() for length in lengths]
        self.rows = [
            [torch.zeros(length, dtype=torch.int16), torch.zeros(length), torch.zeros(length)] for length in lengths
        ]
        self.steps = [0] * len(lengths)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of the next step; now and then there is none for a parameter."""
        gradients = [torch.randn(len(param), generator=self.generator).bfloat16() for param in self.params]
        missing = torch.rand(len(gradients), generator=self.generator) < 0.1
        missing[0] = False
        return [None if is_missing else grad for grad, is_missing in zip(gradients, missing, strict=True)]

    def step(self, gradients: list[torch.Tensor | None], max_norm: float | None) -> None:
        norm = math.sqrt(total(sum_of_squares(grad) for grad in gradients if grad is not None))
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.steps[index] += 1
                scalars = Hyper().scalars(self.steps[index], scale)
                remainder.update(gradient, *self.rows[index], self.params[index], scalars)


def optimizer_of(params: list[torch.Tensor], policy: str, **options: Any) -> InterleavedAdamW:
    arguments = {"subgroup_params": 70, "threads": 1, "machine": MACHINE, "master": "remainder", **options}
    return InterleavedAdamW(params, policy=policy, **arguments)


def run_steps(
    job: ReferenceJob, params: list[torch.Tensor], optimizer: InterleavedAdamW, count: int, max_norm: float | None
) -> None:
    """Run steps of both with the same gradients, by a backward, and compare the parameters."""
    for _ in range(count):
        gradients = job.gradients()
        for param in params:
            param.grad = None
        pairs = [(param, grad) for param, grad in zip(params, gradients, strict=True) if grad is not None]
        torch.autograd.backward([param for param, _ in pairs], [grad for _, grad in pairs])
        optimizer.step()
        job.step(gradients, max_norm)
        for param, expected in zip(params, job.params, strict=True):
            assert torch.equal(bits(param.detach()), bits(expected))


def leaves(job: ReferenceJob) -> list[torch.Tensor]:
    return [param.clone().requires_grad_() for param in job.params]


def masters(job: ReferenceJob) -> list[torch.Tensor]:
    return [remainder.join_tensors(param, rows[0]) for param, rows in zip(job.params, job.rows, strict=True)]


def assert_states(optimizer: InterleavedAdamW, job: ReferenceJob) -> None:
    saved = optimizer.state_dict()["state"]
    for index, master in enumerate(masters(job)):
        if job.steps[index]:
            assert torch.equal(bits(saved[index]["master"]), bits(master))
            assert torch.equal(bits(saved[index]["exp_avg"]), bits(job.rows[index][1]))
            assert torch.equal(bits(saved[index]["exp_avg_sq"]), bits(job.rows[index][2]))


@settings(max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    policy=st.sampled_from(POLICIES),
    streamed=st.booleans(),
    max_norm=st.sampled_from([None, 3.0]),
    budget_share=st.sampled_from([None, 0.2, 0.6, 2.0]),
    seed=st.integers(0, 2**31),
)
def test_step__gives_the_bits_of_the_reference(
    lengths: list[int], policy: str, streamed: bool, max_norm: float | None, budget_share: float | None, seed: int
) -> None:
    job = ReferenceJob(lengths, seed)
    params = leaves(job)
    is_adaptive = policy == "adaptive"
    budget = budget_share * 12 * sum(lengths) if budget_share is not None and is_adaptive else None
    optimizer = optimizer_of(
        params,
        policy,
        gradients="streamed" if streamed else "kept",
        max_grad_norm=max_norm,
        memory_budget=budget,
    )
    run_steps(job, params, optimizer, 4, max_norm)
    assert_states(optimizer, job)
    optimizer.close()
