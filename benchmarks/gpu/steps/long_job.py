"""A GPT on long sequences whose activations fill the card in the backward; its optimizer is InterleavedAdamW.

Its layers are checkpointed in two halves: the forward leaves most of the card free, the backward makes one half's
activations anew and fills it. So there is a window from the end of each backward to the end of the next forward. How
many sequences fill the card follows from what one and two take. Without a GPU the device is emulated, and the budgets
are shares of the state.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from step import ROOT, load
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.machines.machine import load_machine

GPT = load(ROOT / "examples" / "train_gpt.py").GPT
VOCABULARY, HALVES, STATE_BYTES = 512, 2, 12
# How much of the state has room while activations are at their peak. The rest is what windows are for.
SHARE_AT_PEAK = 0.4
# Of the card, left to the roundings of torch's allocator and to what CUDA itself takes.
MARGIN = 0.05
EMULATED_BYTES_PER_S, EMULATED_PARAMS_PER_S = 1e9, 4e9


class Halves(GPT):  # type: ignore[misc, valid-type]
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        size = -(-len(self.blocks) // HALVES)
        for begin in range(0, len(self.blocks), size):
            x = checkpoint(nn.Sequential(*self.blocks[begin : begin + size]), x, use_reentrant=False)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def peaks(model: nn.Module, sequences: int, context: int) -> tuple[int, int]:
    """What the forward and the backward take at most, beside parameters, bytes."""
    before = torch.cuda.memory_allocated()
    tokens = torch.randint(VOCABULARY, (sequences, context + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(model, tokens)
    forward = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    backward = torch.cuda.max_memory_allocated() - before
    del loss
    model.zero_grad()
    torch.cuda.empty_cache()
    return forward, backward


def filled(model: nn.Module, context: int, state: float) -> tuple[int, dict[str, float]]:
    """(how many sequences fill the card, what state may take of it in each phase)."""
    # The first call allocates workspaces that stay.
    peaks(model, 1, context)
    one, two = peaks(model, 1, context), peaks(model, 2, context)
    each = [b - a for a, b in zip(one, two, strict=True)]
    fixed = [a - e for a, e in zip(one, each, strict=True)]
    params = sum(param.nbytes for param in model.parameters())
    free, total = torch.cuda.mem_get_info()
    room = free - MARGIN * total
    sequences = max(1, int((room - fixed[1] - SHARE_AT_PEAK * state) / each[1]))
    forward, backward = (room - f - e * sequences for f, e in zip(fixed, each, strict=True))
    # In the update there are gradients, as large as parameters.
    budget = {"forward": forward, "backward": min(backward, SHARE_AT_PEAK * state), "update": room - params}
    return sequences, {phase: max(0.0, size) for phase, size in budget.items()}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 24, "width": 2048, "heads": 16, "context": 8192, "steps": 8}
    for name, default in sizes.items():
        flags.add_argument(f"--{name}", type=int, default=default)
    flags.add_argument("--policy", default="adaptive")
    flags.add_argument("--by-phase", action="store_true", help="the budget of each phase; else the least of them")
    flags.add_argument("--machine", type=Path)
    flags.add_argument("--told", type=Path, required=True)
    args = flags.parse_args()

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    # Else gradients differ from run to run, and losses tell nothing.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Halves(VOCABULARY, args.context, args.layers, args.width, args.heads)
    params = sum(param.numel() for param in model.parameters())
    state = STATE_BYTES * params
    options: dict[str, Any] = {"policy": args.policy, "subgroup_params": -(-params // 20)}
    if on_gpu:
        sequences, budget = filled(model, args.context, state)
        options["machine"] = load_machine(args.machine) if args.machine else None
    else:
        sequences, budget = 1, {"forward": 2.0 * state, "backward": SHARE_AT_PEAK * state, "update": 2.0 * state}
        rates = (EMULATED_BYTES_PER_S, EMULATED_BYTES_PER_S, EMULATED_PARAMS_PER_S)
        options |= {"device": EmulatedDevice(2 * state, *rates), "threads": 1}
    options["memory_budget"] = budget if args.by_phase else min(budget.values())
    # Not by the generator that filled() drew from: every run trains on the same tokens.
    tokens = torch.randint(VOCABULARY, (sequences, args.context + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(device)
    told: dict[str, Any] = {"params": params, "context": args.context, "sequences": sequences, "state_bytes": state}
    told["budget_bytes"] = options["memory_budget"]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    iterations, losses = [], []
    with closing(InterleavedAdamW(model.parameters(), lr=1e-4, **options)) as optimizer:
        for step in range(args.steps):
            begun = time.perf_counter()
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            iterations.append((time.perf_counter() - begun) * 1e3)
            print(f"step {step:3d}  loss {losses[-1]:.4f}  {iterations[-1]:7.1f} ms", flush=True)
        last = optimizer.last_schedule
        assert last is not None
        told |= {"parked": len(last.plan.parked), "resident": len(last.plan.resident), "plan": last.plan.counts()}
        told |= {"subgroups": last.plan.subgroups, "state_peak_bytes": last.peak_device_bytes}
        told |= {"update_ms": last.update_s * 1e3, "iteration_ms": iterations, "losses": losses}
    if on_gpu:
        stats = torch.cuda.memory_stats()
        told["peak_allocated_bytes"] = stats["allocated_bytes.all.peak"]
        # Each is a moment at which the allocator had to give back its cache to go on.
        told |= {"allocator_retries": stats["num_alloc_retries"], "out_of_memory": stats["num_ooms"]}
    args.told.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
