"""A training script that knows nothing of ebbtide: a GPT on a file of Python's.

    ebbtide run -- python examples/train_plain.py
    ebbtide compare -- python examples/train_plain.py

Its loop is as in many scripts: two groups, a fused AdamW, micro-steps, clipping, a
cosine schedule, and a checkpoint that it resumes from.
"""

import argparse
import inspect
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, BATCH, MICRO_STEPS = 64, 4, 2


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(128, width),
            nn.Embedding(CONTEXT, width),
        )
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()

    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = inspect.getsource(argparse)
    data = torch.tensor([min(ord(letter), 127) for letter in text], device=device)
    model = GPT(options.layers, options.width).to(device)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    checkpoint, begin = options.out / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
        print(f"resumes at step {begin}")
    generator = torch.Generator().manual_seed(begin)
    for step in range(begin, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for _ in range(MICRO_STEPS):
            places = torch.randint(
                len(data) - CONTEXT - 1, (BATCH,), generator=generator
            )
            rows = torch.stack([data[place : place + CONTEXT + 1] for place in places])
            loss = model(rows[:, :-1], rows[:, 1:])
            (loss / MICRO_STEPS).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    options.out.mkdir(exist_ok=True)
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": options.steps,
    }
    torch.save(saved, checkpoint)


if __name__ == "__main__":
    main()
