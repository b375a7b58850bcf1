"""Measure how exactly SuperOffload's rollback restores the state of before a step.

    python benchmarks/super_offload_rollback.py

DeepSpeed computes the old state from the new one. It calls this only for a step whose
norm is not finite. Prints Markdown.
"""

from __future__ import annotations

import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from extensions import use_own_extensions
from tables import machine_line, table

PARAMS = 1_000_000
LEARNING_RATE = 1e-4


def share(mask: torch.Tensor) -> str:
    return f"{100 * float(mask.float().mean()):.1f} %"


def rollback(gradient: torch.Tensor) -> list[str]:
    """Return what differs after three steps, and a fourth one with `gradient` that is
    rolled back."""
    torch.manual_seed(0)
    master = torch.nn.Parameter(torch.randn(PARAMS) * 0.02)
    optimizer = DeepSpeedCPUAdam([master], lr=LEARNING_RATE, weight_decay=0.01)
    for _ in range(3):
        master.grad = torch.randn(PARAMS)
        optimizer.step_subgroup(0)
    state = [
        master.detach(),
        optimizer.state[0]["exp_avg"],
        optimizer.state[0]["exp_avg_sq"],
    ]
    before = [tensor.clone() for tensor in state]
    master.grad = gradient
    optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    same = [share(old == new) for old, new in zip(before, state, strict=True)]
    difference = float((state[0] - before[0]).abs().max()) / LEARNING_RATE
    return [*same, f"{difference:.2g}", share(state[0] == 0), share(state[1].isnan())]


def main() -> None:
    use_own_extensions()
    print(f"{time.strftime('%Y-%m-%d')}, {machine_line()}, torch {torch.__version__}\n")
    finite, infinite = torch.randn(PARAMS), torch.full((PARAMS,), float("inf"))
    heads = [
        "gradients of the step",
        "weights with their old bits",
        "first moments",
        "second moments",
    ]
    heads += [
        "largest difference of a weight, in learning rates",
        "weights that are 0",
        "moments that are NaN",
    ]
    table(heads, [["finite", *rollback(finite)], ["infinite", *rollback(infinite)]])


if __name__ == "__main__":
    main()
