"""Checks that every policy gives the same bits as the CPU, and that device memory stays within the budget.

The same generated gradients are applied by InterleavedAdamW on the GPU under each policy, and once with parameters on
the CPU. Digests of all parameters, masters and moments are compared.
"""

from __future__ import annotations

import gc
import hashlib
from contextlib import closing
from typing import Any

import torch
from step import argument_parser, start

from ebbtide.interleave import InterleavedAdamW
from ebbtide.state_bytes import STATE_BYTES

POLICIES = ("zero-offload", "pipelined", "twin-flow:0.5", "interleaved:2", "adaptive", "gpu-only")
ON_CPU = "zero-offload on the CPU"
# 100 M parameters in tensors that no subgroup ends with.
LENGTHS, TINY_LENGTHS = (25_000_009, 3, 49_999_991, 24_999_983), (500_009, 3, 999_983)
GRADIENTS = 3
SLOTS, PARTS = 3, 10
# Memory for the norm of all gradients and for rounding to blocks of the allocator, in addition to the budget.
SLACK_BYTES = 64 << 20


def bf16(lengths: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=random).to(torch.bfloat16) for length in lengths]


def digest(params: list[Any], optimizer: InterleavedAdamW) -> str:
    hasher = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    for number, param in enumerate(params):
        for tensor in (param.detach(), *(state[number][key] for key in ("master", "exp_avg", "exp_avg_sq"))):
            hasher.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()


def train(
    policy: str, device: torch.device, start: list[torch.Tensor], gradients: list[list[torch.Tensor]]
) -> dict[str, Any]:
    """Train; return the digest, and the peak of device memory in addition to parameters and gradients."""
    total = sum(map(len, start))
    subgroup = -(-total // PARTS)
    budget = None if policy == "gpu-only" else STATE_BYTES * (total / 2 + SLOTS * subgroup)
    params = [torch.nn.Parameter(param.to(device, copy=True)) for param in start]
    on_gpu = device.type == "cuda"
    for param in params:
        param.grad = torch.empty_like(param)
    initial_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    options = {"policy": policy, "subgroup_params": subgroup, "memory_budget": budget, "max_grad_norm": 1.0}
    with closing(InterleavedAdamW(params, lr=1e-3, **options)) as optimizer:
        for number in range(2 * len(gradients)):
            for param, gradient in zip(params, gradients[number % len(gradients)], strict=True):
                param.grad.copy_(gradient)
            optimizer.step()
        peak = torch.cuda.max_memory_allocated() - initial_bytes if on_gpu else None
        return {"digest": digest(params, optimizer), "budget_bytes": budget, "state_peak_bytes": peak}


def main() -> None:
    step = start(argument_parser(__doc__).parse_args())
    lengths = TINY_LENGTHS if step.rehearse else LENGTHS
    initial = bf16(lengths, 0)
    gradients = [bf16(lengths, 1 + number) for number in range(GRADIENTS)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs: dict[str, Any] = {ON_CPU: train("zero-offload", torch.device("cpu"), initial, gradients)}
    for policy in POLICIES:
        runs[policy] = train(policy, device, initial, gradients)
        gc.collect()
        step.add(params=sum(lengths), device=str(device), policies=runs)
    step.check("one digest under every policy and on the CPU", len({run["digest"] for run in runs.values()}) == 1)
    measured = [run for run in runs.values() if run["state_peak_bytes"] is not None and run["budget_bytes"] is not None]
    within = all(run["state_peak_bytes"] <= run["budget_bytes"] + SLACK_BYTES for run in measured)
    step.check("state on the device within its budget", within if measured else None)


if __name__ == "__main__":
    main()
