"""Make checkpoints of a version of ebbtide, which later ones are to read: python
make.py VERSION.pt"""

import sys

import torch

from ebbtide.interleave import InterleavedOptimizer

RULES = {"adamw": "adamw", "remainder": "adamw-remainder"}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)]
    return torch.nn.Sequential(*layers).bfloat16()


def make_optimizer(model: torch.nn.Module, kind: str) -> InterleavedOptimizer:
    options = {"lr": 1e-2, "subgroup_params": 100, "policy": "zero-offload"}
    return InterleavedOptimizer(model.parameters(), RULES[kind], **options)


def train(
    model: torch.nn.Module, optimizer: InterleavedOptimizer, steps: int, seed: int
) -> None:
    for x in torch.randn(
        steps, 5, 8, generator=torch.Generator().manual_seed(seed)
    ).bfloat16():
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def main(path: str) -> None:
    checkpoints = {}
    for kind in RULES:
        model = make_model()
        optimizer = make_optimizer(model, kind)
        train(model, optimizer, steps=3, seed=1)
        checkpoint = {"model": values_of(model), "optimizer": optimizer.state_dict()}
        train(model, optimizer, steps=1, seed=2)
        checkpoints[kind] = {**checkpoint, "next": values_of(model)}
        optimizer.close()
    torch.save(checkpoints, path)


if __name__ == "__main__":
    main(sys.argv[1])
