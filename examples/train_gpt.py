"""Train a small GPT on a text that the script generates.

    python examples/train_gpt.py                      # a small model, on the GPU if there is one
    python examples/train_gpt.py --layers 12 --width 768 --steps 50
    ebbtide profile -o run.ebb -- python examples/train_gpt.py
    python examples/train_gpt.py --dtype bfloat16 --optimizer interleaved    # optimizer state offloaded by ebbtide

This is plain PyTorch, like most training scripts: a data loader, a model, AdamW,
gradient accumulation, clipping.
"""

import argparse
import random
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    """Characters of generated sentences, each of a subject, a verb and an object."""

    subjects = (
        "the tide",
        "a gull",
        "the moon",
        "an old boat",
        "the harbour",
        "her anchor",
    )
    verbs = ("lifts", "follows", "holds", "turns", "remembers", "leaves")
    objects = (
        "the shore",
        "every wave",
        "the sand",
        "its rope",
        "a quiet bay",
        "the light",
    )

    def __init__(self, sentences: int, context: int, seed: int = 0) -> None:
        pick = random.Random(seed).choice
        text = " ".join(
            f"{pick(self.subjects)} {pick(self.verbs)} {pick(self.objects)}."
            for _ in range(sentences)
        )
        letters = sorted(set(text))
        self.vocabulary = len(letters)
        self.tokens = torch.tensor([letters.index(letter) for letter in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        tokens = self.tokens[start : start + self.context + 1]
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a layer norm before it and a
    residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, heads: int
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer of a name: torch's AdamW, or the one of ebbtide."""
    if name == "adamw":
        return torch.optim.AdamW
    from ebbtide.interleave import InterleavedAdamW

    return InterleavedAdamW


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options for the size of the model and the length of the
    training."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--layers", type=int, default=6)
    flags.add_argument("--width", type=int, default=256)
    flags.add_argument("--heads", type=int, default=8)
    flags.add_argument("--context", type=int, default=256)
    flags.add_argument("--batch", type=int, default=8)
    flags.add_argument(
        "--accumulate", type=int, default=1, help="micro-steps per update; default 1"
    )
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--seed", type=int, default=0)
    return flags


def main() -> None:
    flags = make_parser(__doc__.splitlines()[0])
    flags.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--optimizer", default="adamw", choices=["adamw", "interleaved"])
    args = flags.parse_args()

    torch.manual_seed(args.seed)
    data = Sentences(20_000, args.context, args.seed)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True)
    model = GPT(data.vocabulary, args.context, args.layers, args.width, args.heads)
    model = model.to(args.device, getattr(torch, args.dtype))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {args.dtype} on {args.device}")

    optimizer = optimizer_class(args.optimizer)(model.parameters(), lr=3e-4)
    batches = iter(loader)
    for step in range(args.steps):
        start = time.perf_counter()
        for _ in range(args.accumulate):
            tokens, targets = (part.to(args.device) for part in next(batches))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            (loss / args.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"step {step:3d}  loss {loss.item():.4f}  "
            f"{1e3 * (time.perf_counter() - start):7.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
