"""Pretrain a GPT from a file of tokens on one GPU: a usual training script, which knows
nothing of ebbtide.

    ebbtide dry-run --gpu h100-80gb-sxm-published -o run.ebb -- python examples/dry_run/pretrain.py --data tokens.bin

The data are token numbers of 16 bits. It compiles the model, accumulates gradients,
clips them, evaluates between steps, keeps the best and the last checkpoint, and stops
early. Without a GPU only a dry run of it works.
"""

import argparse
import math
import os
import shutil
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """A GPT whose head has the weights of the token embedding."""

    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, heads: int
    ) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions(
            torch.arange(x.shape[1], device=x.device)
        )
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(
            self.head(self.norm(hidden)).flatten(0, 1), targets.flatten()
        )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--data", required=True, help="file of 16-bit token numbers")
    flags.add_argument(
        "--output",
        default="pretrain-output",
        help="folder of checkpoints; default pretrain-output",
    )
    flags.add_argument("--layers", type=int, default=12)
    flags.add_argument("--width", type=int, default=768)
    flags.add_argument("--heads", type=int, default=12)
    flags.add_argument("--context", type=int, default=1024)
    flags.add_argument("--vocabulary", type=int, default=50304)
    flags.add_argument(
        "--batch", type=int, default=12, help="sequences of a micro-batch; default 12"
    )
    flags.add_argument(
        "--accumulation", type=int, default=4, help="micro-batches of a step; default 4"
    )
    flags.add_argument("--steps", type=int, default=100_000)
    flags.add_argument(
        "--evaluate-every",
        type=int,
        default=1000,
        help="steps between evaluations; default 1000",
    )
    flags.add_argument("--evaluation-batches", type=int, default=20)
    flags.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    args = flags.parse_args()

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    os.makedirs(args.output, exist_ok=True)
    last, best = (os.path.join(args.output, name) for name in ("last.pt", "best.pt"))
    autocast = (
        torch.autocast("cuda", getattr(torch, args.dtype))
        if torch.cuda.is_available()
        else nullcontext()
    )

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(args.data, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - args.context, (args.batch,)).tolist()
        parts = torch.stack(
            [
                torch.from_numpy(data[at : at + args.context + 1].astype(np.int64))
                for at in starts
            ]
        )
        parts = parts.pin_memory()
        return parts[:, :-1].cuda(non_blocking=True), parts[:, 1:].cuda(
            non_blocking=True
        )

    model = Decoder(
        args.vocabulary, args.context, args.layers, args.width, args.heads
    ).to("cuda")
    print(
        f"{sum({p.data_ptr(): p.numel() for p in model.parameters()}.values()) / 1e6:.1f} million parameters"
    )
    groups = [
        {
            "params": [p for p in model.parameters() if p.dim() >= 2],
            "weight_decay": 0.1,
        },
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = torch.amp.GradScaler(enabled=args.dtype == "float16")
    compiled = torch.compile(model)

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        losses = torch.zeros(args.evaluation_batches)
        for number in range(args.evaluation_batches):
            with autocast:
                losses[number] = compiled(*batch()).item()
        model.train()
        return losses.mean().item()

    lowest, patience, first = math.inf, 5, 0
    if os.path.exists(last):
        saved = torch.load(last, map_location="cuda", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    start_s = time.perf_counter()
    for step in range(first, args.steps):
        if step % args.evaluate_every == 0:
            loss = evaluate()
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                },
                last + ".tmp",
            )
            os.replace(last + ".tmp", last)
            if loss < lowest:
                lowest, patience = loss, 5
                shutil.copyfile(last, best)
            else:
                patience -= 1
            print(f"step {step}  evaluation loss {loss:.4f}")
            if not patience:
                break
        for _ in range(args.accumulation):
            with autocast:
                loss = compiled(*batch()) / args.accumulation
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm) and not scaler.is_enabled():
            raise SystemExit(f"the gradients of step {step} are not finite")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        elapsed_s, start_s = time.perf_counter() - start_s, time.perf_counter()
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(
            f"step {step}  loss {loss.item() * args.accumulation:.4f}  {elapsed_s:.2f} "
            f"s  peak {peak:.2f} GB"
        )


if __name__ == "__main__":
    main()
