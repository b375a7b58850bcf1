"""The same bits under every policy, and on the CPU; device memory within the budget.

Made gradients, the same ones each time, go into InterleavedAdamW on the GPU under each policy and once into one whose
parameters are on the CPU. Compared are digests of all parameters, masters and moments.
"""

from __future__ import annotations

import gc
import hashlib
from contextlib import closing
from typing import Any

import torch
from step import arguments, begin

from ebbtide.interleave import InterleavedAdamW

POLICIES = ("zero-offload", "pipelined", "twin-flow:0.5", "interleaved:2", "adaptive", "gpu-only")
ON_CPU = "zero-offload on the CPU"
# 100 M parameters in tensors that no subgroup ends with.
LENGTHS, TINY_LENGTHS = (25_000_009, 3, 49_999_991, 24_999_983), (500_009, 3, 999_983)
GRADIENTS = 3
STATE_BYTES, SLOTS, PARTS = 12, 3, 10
# What the norm of all gradients, and rounding to the allocator's blocks, may take beside the budget.
SLACK_BYTES = 64 << 20


def bf16(lengths: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=random).to(torch.bfloat16) for length in lengths]


def digest(params: list[Any], optimizer: InterleavedAdamW) -> str:
    found = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    for number, param in enumerate(params):
        for tensor in (param.detach(), *(state[number][key] for key in ("master", "exp_avg", "exp_avg_sq"))):
            found.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def trained(
    policy: str, device: torch.device, start: list[torch.Tensor], gradients: list[list[torch.Tensor]]
) -> dict[str, Any]:
    """state_peak_bytes: of the device, beside parameters and gradients."""
    total = sum(map(len, start))
    subgroup = -(-total // PARTS)
    budget = None if policy == "gpu-only" else STATE_BYTES * (total / 2 + SLOTS * subgroup)
    params = [torch.nn.Parameter(param.to(device, copy=True)) for param in start]
    on_gpu = device.type == "cuda"
    for param in params:
        param.grad = torch.empty_like(param)
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    options = {"policy": policy, "subgroup_params": subgroup, "memory_budget": budget, "max_grad_norm": 1.0}
    with closing(InterleavedAdamW(params, lr=1e-3, **options)) as optimizer:
        for number in range(2 * len(gradients)):
            for param, gradient in zip(params, gradients[number % len(gradients)], strict=True):
                param.grad.copy_(gradient)
            optimizer.step()
        peak = torch.cuda.max_memory_allocated() - held if on_gpu else None
        return {"digest": digest(params, optimizer), "budget_bytes": budget, "state_peak_bytes": peak}


def main() -> None:
    step = begin(arguments(__doc__).parse_args())
    lengths = TINY_LENGTHS if step.rehearse else LENGTHS
    start = bf16(lengths, 0)
    gradients = [bf16(lengths, 1 + number) for number in range(GRADIENTS)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {ON_CPU: trained("zero-offload", torch.device("cpu"), start, gradients)}
    for policy in POLICIES:
        found[policy] = trained(policy, device, start, gradients)
        gc.collect()
        step.tell(params=sum(lengths), device=str(device), policies=found)
    step.check("one digest under every policy and on the CPU", len({run["digest"] for run in found.values()}) == 1)
    known = [run for run in found.values() if run["state_peak_bytes"] is not None and run["budget_bytes"] is not None]
    within = all(run["state_peak_bytes"] <= run["budget_bytes"] + SLACK_BYTES for run in known)
    step.check("state on the device within its budget", within if known else None)


if __name__ == "__main__":
    main()
