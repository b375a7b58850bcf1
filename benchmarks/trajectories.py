"""Compare training with each update rule to the same in double precision: ebbtide's
optimizer and torch's.

    python benchmarks/trajectories.py [--steps 100] [--policy zero-offload]

A network of two matrices learns the outputs of another one from random inputs, the same
in all runs, in fp32. In double precision the formula of the rule runs with moments that
are not rounded. Errors of a step are those of the change of the parameters in the first
step, relative to the change; errors of losses are the largest of all steps, relative to
the loss. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tables import machine_line, table

from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.rules import RULES, UpdateRule

GROUPS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "muon": {"lr": 0.01},
    "lion": {"lr": 3e-4},
}
WIDTH, HIDDEN, BATCH = 64, 128, 256


class DoubleOptimizer:
    """The formula of a rule in double precision, on parameters in double precision."""

    def __init__(
        self,
        params: Iterator[torch.nn.Parameter],
        rule: UpdateRule,
        group: dict[str, Any],
    ) -> None:
        self.rule, self.group, self.steps = rule, group, 0
        self.states = [
            (param, [np.zeros(param.shape) for _ in rule.moments]) for param in params
        ]

    def step(self) -> None:
        self.steps += 1
        factors = self.rule.factors(self.group, self.steps)
        for param, moments in self.states:
            gradient, own, result = param.grad.numpy(), param.detach().numpy(), None
            whole = self.rule.whole_update
            if whole is None:
                own[...], *result = self.rule.formula(
                    gradient, own, *moments, *factors[: len(factors) - self.rule.rounds]
                )
            else:
                scalars = self.rule.scalars(self.group, self.steps)
                parts = whole.parts(scalars, (param.shape[0], param.shape[1]))
                direction, *result = self.rule.formula(
                    gradient, 0 * own, *moments, *map(float, parts.scalars[1:])
                )
                x = direction / np.linalg.norm(direction)
                a, b, c = map(float, parts.coefficients)
                for _ in range(parts.steps):
                    gram = x @ x.T
                    x = a * x + (b * gram + c * gram @ gram) @ x
                (own[...],) = whole.finish.formula(
                    x, own, *map(float, parts.finish_scalars[1:])
                )
            for moment, new in zip(moments, result, strict=True):
                moment[...] = new


def train(
    make: Callable[[Iterator[torch.nn.Parameter]], Any], dtype: torch.dtype, steps: int
) -> tuple[Any, Any]:
    """Return the change of the parameters in the first step, and the losses."""
    torch.manual_seed(0)
    teacher, model = (
        torch.nn.Sequential(
            torch.nn.Linear(WIDTH, HIDDEN, bias=False),
            torch.nn.GELU(),
            torch.nn.Linear(HIDDEN, WIDTH, bias=False),
        ).to(dtype)
        for _ in range(2)
    )
    optimizer, change, losses = make(model.parameters()), None, []
    before = torch.cat(
        [param.detach().flatten() for param in model.parameters()]
    ).double()
    for _ in range(steps):
        inputs = torch.randn(BATCH, WIDTH).to(dtype)
        loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if change is None:
            change = (
                torch.cat(
                    [param.detach().flatten() for param in model.parameters()]
                ).double()
                - before
            )
    return change, np.array(losses)


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--policy", default="zero-offload")
    args = flags.parse_args()
    rows = []
    for rule in RULES.values():
        own = GROUPS.get(rule.name, {})
        group = {**rule.defaults, **own}
        change, losses = train(
            partial(DoubleOptimizer, rule=rule, group=group), torch.float64, args.steps
        )
        makers = {
            "ebbtide": partial(
                InterleavedOptimizer, rule=rule.name, policy=args.policy, **own
            )
        }
        if make := getattr(torch.optim, rule.title, None):
            makers["torch"] = partial(make, **own)
        cells: dict[str, tuple[str, str, str]] = {}
        for name, maker in makers.items():
            own_change, own_losses = train(maker, torch.float32, args.steps)
            error = ((own_change - change).norm() / change.norm()).item()
            cells[name] = (
                f"{error:.0e}",
                f"{np.abs(own_losses / losses - 1).max():.0e}",
                f"{own_losses[-1]:.4g}",
            )
        theirs = cells.get("torch", ("-",) * 3)
        pairs = (
            f"{mine} / {other}"
            for mine, other in zip(cells["ebbtide"], theirs, strict=True)
        )
        rows.append((f"`{rule.name}`", *pairs, f"{losses[0]:.3g} to {losses[-1]:.4g}"))
    print(
        f"{machine_line()}, torch {torch.__version__}, {args.steps} steps, ebbtide / "
        "torch\n"
    )
    table(
        (
            "rule",
            "error of a step",
            "error of losses",
            "last loss",
            "loss in double precision",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
