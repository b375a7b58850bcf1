"""Trains a GPT on long sequences whose activations fill the card in the backward, with
InterleavedAdamW.

Its layers are checkpointed in two halves: the forward leaves most of the card free, the
backward recomputes the activations of one half and fills it. So there is a window from
the end of each backward to the end of the next forward. The number of sequences that
fill the card follows from the memory of one and two. Without a GPU the device is
emulated, and the budgets are shares of the state.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from step import ROOT, load, use_deterministic_algorithms
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.machines.machine import load_machine
from ebbtide.state_bytes import STATE_BYTES

GPT = load(ROOT / "examples" / "train_gpt.py").GPT
VOCABULARY, HALVES = 512, 2
# Share of the state that fits while activations are at their peak. The others need
# windows.
SHARE_AT_PEAK = 0.4
# Share of the card that is left to rounding by the allocator of torch and to CUDA
# itself.
MARGIN = 0.05
EMULATED_BYTES_PER_S, EMULATED_PARAMS_PER_S = 1e9, 4e9


class CheckpointedGPT(GPT):  # type: ignore[misc, valid-type]
    """A GPT whose layers are checkpointed in two halves."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        size = -(-len(self.blocks) // HALVES)
        for begin in range(0, len(self.blocks), size):
            x = checkpoint(
                nn.Sequential(*self.blocks[begin : begin + size]),
                x,
                use_reentrant=False,
            )
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def peaks(model: nn.Module, sequences: int, context: int) -> tuple[int, int]:
    """Return the peak memory of forward and backward in bytes, without parameters."""
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


def fill_card(
    model: nn.Module, context: int, state: float
) -> tuple[int, dict[str, float]]:
    """Return the number of sequences that fill the card, and the bytes for state in
    each phase."""
    # The first call allocates permanent workspaces.
    peaks(model, 1, context)
    one, two = peaks(model, 1, context), peaks(model, 2, context)
    each = [b - a for a, b in zip(one, two, strict=True)]
    fixed = [a - e for a, e in zip(one, each, strict=True)]
    params = sum(param.nbytes for param in model.parameters())
    free, total = torch.cuda.mem_get_info()
    usable = free - MARGIN * total
    sequences = max(1, int((usable - fixed[1] - SHARE_AT_PEAK * state) / each[1]))
    forward, backward = (
        usable - f - e * sequences for f, e in zip(fixed, each, strict=True)
    )
    # During the update there are gradients, which are as large as the parameters.
    budget = {
        "forward": forward,
        "backward": min(backward, SHARE_AT_PEAK * state),
        "update": usable - params,
    }
    return sequences, {phase: max(0.0, size) for phase, size in budget.items()}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 24, "width": 2048, "heads": 16, "context": 8192, "steps": 8}
    for name, default in sizes.items():
        flags.add_argument(f"--{name}", type=int, default=default)
    flags.add_argument("--policy", default="adaptive")
    flags.add_argument(
        "--by-phase",
        action="store_true",
        help="use the budget of each phase instead of the lowest one",
    )
    flags.add_argument("--machine", type=Path)
    flags.add_argument("--results", type=Path, required=True, help="JSON file to write")
    args = flags.parse_args()

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    # Otherwise gradients differ from run to run, and losses cannot be compared.
    use_deterministic_algorithms()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = CheckpointedGPT(
            VOCABULARY, args.context, args.layers, args.width, args.heads
        )
    params = sum(param.numel() for param in model.parameters())
    state = STATE_BYTES * params
    options: dict[str, Any] = {
        "policy": args.policy,
        "subgroup_params": -(-params // 20),
    }
    if on_gpu:
        sequences, budget = fill_card(model, args.context, state)
        options["machine"] = load_machine(args.machine) if args.machine else None
    else:
        sequences, budget = (
            1,
            {
                "forward": 2.0 * state,
                "backward": SHARE_AT_PEAK * state,
                "update": 2.0 * state,
            },
        )
        rates = (EMULATED_BYTES_PER_S, EMULATED_BYTES_PER_S, EMULATED_PARAMS_PER_S)
        options |= {"device": EmulatedDevice(2 * state, *rates), "threads": 1}
    options["memory_budget"] = budget if args.by_phase else min(budget.values())
    # Not from the generator that fill_card() used: every run trains on the same tokens.
    tokens = torch.randint(
        VOCABULARY,
        (sequences, args.context + 1),
        generator=torch.Generator().manual_seed(1),
    )
    tokens = tokens.to(device)
    results: dict[str, Any] = {
        "params": params,
        "context": args.context,
        "sequences": sequences,
        "state_bytes": state,
    }
    results["budget_bytes"] = options["memory_budget"]
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
            print(
                f"step {step:3d}  loss {losses[-1]:.4f}  {iterations[-1]:7.1f} ms",
                flush=True,
            )
        last = optimizer.last_schedule
        assert last is not None
        results |= {
            "parked": len(last.plan.parked),
            "resident": len(last.plan.resident),
            "plan": last.plan.counts(),
        }
        results |= {
            "subgroups": last.plan.subgroups,
            "state_peak_bytes": last.peak_device_bytes,
        }
        results |= {
            "update_ms": last.update_s * 1e3,
            "iteration_ms": iterations,
            "losses": losses,
        }
    if on_gpu:
        stats = torch.cuda.memory_stats()
        results["peak_allocated_bytes"] = stats["allocated_bytes.all.peak"]
        # Each retry is a moment at which the allocator had to release its cache.
        results |= {
            "allocator_retries": stats["num_alloc_retries"],
            "out_of_memory": stats["num_ooms"],
        }
    args.results.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
