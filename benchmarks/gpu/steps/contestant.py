"""Trains the model of the table with one optimizer, in a process of its own. Prints its
result as JSON.

The model is a GPT in bf16 whose batches have 8,192 tokens. Gradients are clipped to a
norm of 1 (torchao's optimizer cannot do that), and the algorithms of torch are
deterministic, so that losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step import ROOT, load, use_deterministic_algorithms
from torch import nn
from torch.nn import functional as F

VOCABULARY, CONTEXT, BATCH = 512, 1024, 8
TINY_CONTEXT, TINY_BATCH = 32, 2
# Parameters -> layers, width, heads.
SHAPES = {1_500_000_000: (48, 1600, 25), 4_000_000_000: (35, 3072, 24), 0: (2, 128, 4)}
WARM_UP, STEPS = 3, 5
LR, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0
# Subgroups of the state, and how many of them ebbtide may have on the device.
SUBGROUPS, SLOTS = 15, 3


class Contestant(NamedTuple):
    """An optimizer.

    Attributes:
        about: What it is.
        state: The precision of what it keeps, and which others have the same bits.
        prepare: Function of (model, arguments) that returns (model to call, function of
            a loss that ends an iteration, function to call at the end).
    """

    about: str
    state: str
    prepare: Callable[[nn.Module, argparse.Namespace], Any]


def _torch(model: nn.Module, args: argparse.Namespace) -> Any:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True
    )

    def finish(loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return model, finish, lambda: None


def _torchao(model: nn.Module, args: argparse.Namespace) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "fused": True}
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **settings)

    def finish(loss: torch.Tensor) -> None:
        # It copies gradients to the host inside the backward: clipping afterwards would
        # change nothing.
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, finish, lambda: None


def _deepspeed(
    changes: dict[str, Any],
) -> Callable[[nn.Module, argparse.Namespace], Any]:
    def prepare(model: nn.Module, args: argparse.Namespace) -> Any:
        import deepspeed

        os.environ.update(
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
            }
        )
        os.environ["MASTER_PORT"] = str(20_000 + os.getpid() % 20_000)
        offload = {"device": "cpu", "pin_memory": torch.cuda.is_available(), **changes}
        config = {
            "train_micro_batch_size_per_gpu": args.batch,
            "gradient_clipping": MAX_NORM,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": offload,
                "sub_group_size": args.subgroup,
            },
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LR, "weight_decay": WEIGHT_DECAY},
            },
            "steps_per_print": 1_000_000,
        }
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

        def finish(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return engine, finish, lambda: None

    return prepare


def _ebbtide(overlap: str) -> Callable[[nn.Module, argparse.Namespace], Any]:
    def prepare(model: nn.Module, args: argparse.Namespace) -> Any:
        from ebbtide.interleave import InterleavedAdamW
        from ebbtide.machines.machine import load_machine
        from ebbtide.state_bytes import STATE_BYTES

        options: dict[str, Any] = {
            "memory_budget": SLOTS * STATE_BYTES * args.subgroup,
            "overlap": overlap,
        }
        if overlap != "none":
            options["model"] = model
        if args.machine and args.machine.exists() and torch.cuda.is_available():
            options["machine"] = load_machine(args.machine)
        optimizer = InterleavedAdamW(
            model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM, gradients="streamed",
            subgroup_params=args.subgroup, **options,
        )  # fmt: skip

        def finish(loss: torch.Tensor) -> None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, finish, optimizer.close

    return prepare


_EXACT = "fp32 masters and moments; the bits of its reference"
_LIKE_DEEPSPEED = "fp32 masters and moments; rounded as DeepSpeed's CPU Adam does"
BASELINE, EXACT = "ZeRO-Offload", ("ebbtide none", "ebbtide forward", "ebbtide both")
# The most telling first.
CONTESTANTS = {
    "ebbtide none": Contestant(
        "adaptive, a fifth of the state on the GPU", _EXACT, _ebbtide("none")
    ),
    BASELINE: Contestant("DeepSpeed, stage 3, pinned", _LIKE_DEEPSPEED, _deepspeed({})),
    "ebbtide forward": Contestant(
        'the same with overlap="forward"', _EXACT, _ebbtide("forward")
    ),
    "ebbtide both": Contestant(
        'the same with overlap="both"', _EXACT, _ebbtide("both")
    ),
    "torch fused AdamW": Contestant(
        "all on the GPU", "bf16 moments, no masters", _torch
    ),
    "SuperOffload": Contestant(
        "DeepSpeed, stage 3, pinned",
        _LIKE_DEEPSPEED,
        _deepspeed({"super_offload": True}),
    ),
    "torchao": Contestant(
        "CPUOffloadOptimizer", "bf16 moments, no masters, no clipping", _torchao
    ),
}
# torchao needs CUDA, and DeepSpeed refuses SuperOffload on its CPU accelerator.
ON_CPU = tuple(name for name in CONTESTANTS if name not in ("SuperOffload", "torchao"))


def available_bytes() -> int:
    """Return the host memory that is available."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert match is not None
    return int(match[1]) * 1024


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train; return the time of each iteration after those for warm-up, the losses and
    the memory."""
    on_gpu = torch.cuda.is_available()
    begun, host_bytes = time.perf_counter(), available_bytes()
    use_deterministic_algorithms()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    # Made on the device: making so many random numbers on the host would take longer
    # than the training.
    with torch.device("cuda" if on_gpu else "cpu"):
        model = load(ROOT / "examples" / "train_gpt.py").GPT(
            VOCABULARY, args.context, *SHAPES[args.params]
        )
    torch.set_default_dtype(torch.float32)
    params = sum(param.numel() for param in model.parameters())
    args.subgroup = -(-params // SUBGROUPS)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        VOCABULARY, (args.batch, args.context + 1), generator=generator
    )
    tokens = tokens.to(next(model.parameters()).device)
    called, finish, close = CONTESTANTS[args.contestant].prepare(model, args)
    losses, ends = [], [time.perf_counter()]
    for _ in range(WARM_UP + STEPS):
        logits = called(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        finish(loss)
        del logits
        # It waits for the job's stream, not for updates that may still run.
        losses.append(loss.item())
        ends.append(time.perf_counter())
    used_bytes = host_bytes - available_bytes()
    close()
    return {
        "params": params,
        "tokens": tokens[:, 1:].numel(),
        "setup_s": ends[0] - begun,
        "iteration_ms": [
            (b - a) * 1e3
            for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)
        ],
        "losses": losses,
        "host_bytes": used_bytes,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("contestant", choices=list(CONTESTANTS))
    flags.add_argument(
        "--params", type=int, choices=list(SHAPES), default=1_500_000_000
    )
    flags.add_argument("--machine", type=Path)
    args = flags.parse_args()
    args.context, args.batch = (
        (TINY_CONTEXT, TINY_BATCH) if args.params == 0 else (CONTEXT, BATCH)
    )
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
