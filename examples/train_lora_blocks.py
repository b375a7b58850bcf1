"""Train adapters (LoRA) on a transformer whose blocks are frozen, with some blocks on
the host.

    python examples/train_lora_blocks.py --width 64 --blocks 6 --tokens 32 --steps 20
    python examples/train_lora_blocks.py --width 64 --blocks 6 --tokens 32 --swap 3
    ebbtide dry-run --gpu rtx3060 -o lora.ebb -- python examples/train_lora_blocks.py

All numbers of swapped blocks give the same losses. Weights on the host are copied up
for each use, and never down: they do not change.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HEAD = 64


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it. Its weight may
    be on the host."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Any) -> Any:
        weight = self.base.weight.to(x.device, non_blocking=True)
        return F.linear(x, weight) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = Adapted(width, 3 * width, rank)
        self.out = Adapted(width, width, rank)
        self.wide = Adapted(width, 4 * width, rank)
        self.narrow = Adapted(4 * width, width, rank)

    def forward(self, x: Any) -> Any:
        samples, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).view(samples, tokens, 3, -1, HEAD)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Model(nn.Module):
    """Checkpointed blocks, of which some are on the host, evenly spread."""

    def __init__(self, flags: argparse.Namespace, device: str) -> None:
        super().__init__()
        count, swapped = flags.blocks, flags.swap
        self.blocks = nn.ModuleList(
            Block(flags.width, flags.rank).to(torch.bfloat16) for _ in range(count)
        )
        for number, block in enumerate(self.blocks):
            is_swapped = (number + 1) * swapped // count > number * swapped // count
            for module in block.modules():
                if is_swapped and isinstance(module, Adapted):
                    weight = module.base.weight
                    weight.data = weight.data.pin_memory() if flags.pin else weight.data
                    module.down.to(device)
                    module.up.to(device)
            if not is_swapped:
                block.to(device)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("width", 4096),
        ("blocks", 40),
        ("tokens", 128),
        ("rank", 16),
        ("swap", 0),
        ("steps", 4),
    ):
        flags.add_argument(f"--{name}", type=int, default=default)
    options = flags.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.pin = device == "cuda"
    torch.manual_seed(0)
    model = Model(options, device)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    x, target = torch.randn(2, 1, options.tokens, options.width, dtype=torch.bfloat16)
    x, target = x.to(device), target.to(device)
    for step in range(options.steps):
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
