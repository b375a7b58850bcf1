"""The jobs that `deepspeed_rivals.py` compares: one model, trained by DeepSpeed's
optimizers and by ebbtide's."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

REFERENCE = "DeepSpeed ZeRO-Offload"
EBBTIDE = "ebbtide: "
ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 8,
    "update_interval": 2,
}
# Name -> changes to zero_optimization.
DEEPSPEED: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "DeepSpeed SuperOffload": {
        "offload_optimizer": {"device": "cpu", "super_offload": True}
    },
    "DeepSpeed ZenFlow": {"zenflow": ZENFLOW},
    "DeepSpeed ZenFlow, overlap_step": {"zenflow": {**ZENFLOW, "overlap_step": True}},
}
ENGINE, OPTIMIZER = EBBTIDE + "enable()", EBBTIDE + "InterleavedAdamW"
# Each of ebbtide's must have the bits of the same one with everything on the CPU.
ON_CPU = ", zero-offload"
NAMES = (*DEEPSPEED, ENGINE + ON_CPU, ENGINE, OPTIMIZER + ON_CPU, OPTIMIZER)
PARTS = ("forward", "backward", "step", "iteration")
# ZenFlow starts its process in the first interval, and SuperOffload's worker is ready
# after the first step.
WARM_UP = 4
LEARNING_RATE = 1e-4


def build_model(args: argparse.Namespace) -> Any:
    """Return the model: blocks of two matrices, each with its share of the emulated
    forward and backward."""
    import torch
    from torch import nn

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.sleep(args.forward_ms / args.blocks / 1e3)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.sleep(args.backward_ms / args.blocks / 1e3)
            return gradient

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (
                nn.Linear(args.width, 4 * args.width),
                nn.Linear(4 * args.width, args.width),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x + self.down(torch.relu(self.up(x)))
            return out if torch.cuda.is_available() else Wait.apply(out)  # type: ignore[no-any-return, no-untyped-call]

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(args.blocks)))


def deepspeed_engine(name: str, model: Any, args: argparse.Namespace) -> Any:
    import deepspeed

    if name.startswith(EBBTIDE):
        from ebbtide.interleave.deepspeed import enable

        enable(subgroup_params=args.subgroup * 1_000_000, **policy_options(name, args))
    else:
        from tests.features.deepspeed.agent.cpu_accelerator import lift_device_checks

        if args.lift_checks:
            lift_device_checks()
    offload = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "sub_group_size": args.subgroup * 1_000_000,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "zero_optimization": {**offload, **DEEPSPEED.get(name, {})},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": 0.01},
        },
        "steps_per_print": 1_000_000,
    }
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )[0]


def policy_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    if name.endswith(ON_CPU):
        return {"policy": "zero-offload"}
    return {"policy": args.policy} | (
        {} if args.overlap == "none" else {"overlap": args.overlap}
    )


def reference_of(name: str) -> str:
    return name.removesuffix(ON_CPU) + ON_CPU if name.startswith(EBBTIDE) else REFERENCE


def contestant(
    name: str, args: argparse.Namespace
) -> tuple[Any, Callable[[Any], None], Callable[[], None], Any]:
    """Return (callable model, backward of a loss, step, function that yields all
    weights)."""
    import torch

    model = build_model(args)
    if name.startswith(OPTIMIZER):
        from ebbtide.interleave import InterleavedAdamW

        model = model.to(torch.bfloat16)
        optimizer = InterleavedAdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, model=model,
            subgroup_params=args.subgroup * 1_000_000, max_grad_norm=args.clip or None, **policy_options(name, args),
        )  # fmt: skip

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def own_weights() -> Iterator[Any]:
            optimizer.synchronize()
            yield from model.parameters()

        return model, lambda loss: loss.backward(), step, own_weights
    engine = deepspeed_engine(name, model, args)

    def gathered_weights() -> Iterator[Any]:
        import deepspeed

        for parameter in engine.module.parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                # ZenFlow's stage 3 has the matrices transposed, except within a forward
                # and a backward.
                yield (
                    parameter.t()
                    if engine.zenflow and parameter.dim() > 1
                    else parameter
                )

    return engine, engine.backward, engine.step, gathered_weights


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the mean milliseconds of each part of an iteration, after some for
    warm-up, and all losses."""
    import torch

    model, backward, step, weights = contestant(name, args)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    part_ms: dict[str, list[float]] = {part: [] for part in PARTS}
    losses = []
    for _ in range(args.steps + WARM_UP):
        batch = torch.randn(1, args.width, generator=generator).to(
            device, torch.bfloat16
        )
        times = [now()]
        loss = model(batch).float().square().mean()
        times.append(now())
        backward(loss)
        times.append(now())
        step()
        times.append(now())
        for part, begin, end in zip(
            PARTS, (*times[:3], times[0]), (*times[1:], times[3]), strict=True
        ):
            part_ms[part].append((end - begin) * 1e3)
        losses.append(loss.item())
    torch.save(
        torch.cat([weight.detach().float().cpu().flatten() for weight in weights()]),
        args.weights,
    )
    return {
        **{part: statistics.mean(values[WARM_UP:]) for part, values in part_ms.items()},
        "losses": losses,
    }
