"""Random jobs of an update rule, under a plan and by the reference.

    python -m tests.interleave.engine.rules.random_jobs [FIRST_SEED [JOBS]]

runs jobs of each rule and prints those whose bits differ."""

from __future__ import annotations

import math
import random
import sys
import tempfile
from typing import Any

import torch

from ebbtide.interleave.engine.numerics import reference, remainder
from ebbtide.interleave.engine.numerics.norm import sum_of_squares, total
from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.interleave.engine.rules import RULES, UpdateRule, find_rule
from tests.interleave.engine.states import bits
from tests.interleave.engine.training import MACHINE

POLICIES = ("zero-offload", "pipelined", "twin-flow:0.4", "interleaved:2", "gpu-only", "adaptive")
HYPERPARAMETERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "adamw": {"betas": ((0.9, 0.999), (0.4, 0.5)), "weight_decay": (0.0, 0.1), "eps": (1e-8, 0.0)},
    "adam": {"betas": ((0.9, 0.999), (0.4, 0.5)), "weight_decay": (0.0, 0.1), "eps": (1e-8, 0.0)},
    "lion": {"betas": ((0.9, 0.99), (0.5, 0.4)), "weight_decay": (0.0, 0.1)},
    "sgd": {"momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1)},
}
MOMENTUM = {"nesterov": (False, True)}, {"dampening": (0.0, 0.3)}


class ReferenceJob:
    """Parameters that the reference updates, one after the other."""

    def __init__(self, rule: UpdateRule, params: list[torch.Tensor], group: dict[str, Any], remainders: bool) -> None:
        self.rule, self.params, self.group, self.remainders = rule, params, group, remainders
        self.steps = [0] * len(params)
        self.states = [[param.detach().float(), *torch.zeros(len(rule.moments), len(param))] for param in params]
        if remainders:
            for state in self.states:
                state[0] = torch.zeros(len(state[0]), dtype=torch.int16)

    def step(self, gradients: list[torch.Tensor | None], max_norm: float | None) -> None:
        norm = math.sqrt(total(sum_of_squares(grad) for grad in gradients if grad is not None))
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        update = remainder.update if self.remainders else reference.update
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.steps[index] += 1
                scalars = self.rule.scalars(self.group, self.steps[index], scale)
                update(gradient, self.states[index], self.params[index].detach(), scalars, self.rule)


def check(rule: UpdateRule, seed: int) -> str | None:
    """Run one job, and return what is wrong with it; None if all bits are those of the reference."""
    choose = random.Random(f"{rule.name} {seed}")
    choices = dict(HYPERPARAMETERS[rule.name])
    group = {name: choose.choice(values) for name, values in choices.items()}
    if group.get("momentum"):
        group |= {name: choose.choice(values) for name, values in choose.choice(MOMENTUM).items()}
    group |= {"lr": choose.choice((1e-3, 0.1))}
    streamed, remainders = choose.random() < 0.5, choose.random() < 0.25
    dtype = torch.bfloat16 if remainders else choose.choice((torch.bfloat16, torch.float32, torch.float16))
    overlaps = ["none", "forward"] + (["backward", "both"] if streamed and not remainders else [])
    policy, overlap = choose.choice(POLICIES), choose.choice(overlaps)
    if policy not in ("pipelined", "interleaved:2", "adaptive"):
        overlap = "none"
    max_norm = choose.choice((None, 0.5, 50.0))
    generator = torch.Generator().manual_seed(seed)
    lengths = [choose.randint(1, 400) for _ in range(choose.randint(1, 5))]
    values = [torch.randn(length, generator=generator).to(dtype) for length in lengths]
    model = torch.nn.ParameterList([torch.nn.Parameter(value.clone()) for value in values])
    own, expected = (
        list(model),
        ReferenceJob(rule, [value.clone() for value in values], {**rule.defaults, **group}, remainders),
    )
    words = f"{rule.name} {seed}: {policy}, overlap {overlap}, {dtype}, streamed {streamed}, {remainders}, {group}"
    with tempfile.TemporaryDirectory() as folder:
        optimizer = InterleavedOptimizer(
            own,
            rule.name,
            policy=policy,
            machine=MACHINE,
            subgroup_params=choose.choice((50, 128, 1000)),
            memory_budget=None if policy != "adaptive" else choose.choice((0, 4000, 1e9)),
            max_grad_norm=max_norm,
            gradients="streamed" if streamed else "kept",
            overlap=overlap,
            model=model if overlap in ("forward", "both") else None,
            master="remainder" if remainders else "fp32",
            storage=folder if choose.random() < 0.2 and policy == "adaptive" else None,
            **group,
        )
        try:
            for _ in range(5):
                factors = [torch.randn(length, generator=generator).to(dtype) for length in lengths]
                loss = sum((param * factor).float().sum() for param, factor in zip(own, factors, strict=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                expected.step(list(factors), max_norm)
            state = optimizer.state_dict()["state"]
            for index, (param, other) in enumerate(zip(own, expected.params, strict=True)):
                if not torch.equal(bits(param.detach()), bits(other)):
                    return f"{words}: parameter {index}"
                for name, row in zip(rule.moments, expected.states[index][1:], strict=True):
                    if not torch.equal(bits(state[index][name]), bits(row)):
                        return f"{words}: {name} of parameter {index}"
        finally:
            optimizer.close()
    return None


def main(first: int = 0, jobs: int = 500) -> None:
    for name in sorted(RULES):
        wrong = [text for seed in range(first, first + jobs) if (text := check(find_rule(name), seed))]
        print(f"{name}: {len(wrong)} of {jobs} jobs differ", *wrong[:5], sep="\n  ", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
