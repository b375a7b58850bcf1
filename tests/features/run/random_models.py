"""Random models whose parameters have all types, shapes and layouts."""

from __future__ import annotations

from random import Random

import torch
from torch import nn

WIDTH = 20
ROWS = 4


class Layer(nn.Module):
    """A product with a matrix that may be bf16, transposed or with gaps in memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        values = torch.randn(WIDTH, WIDTH, dtype=dtype) / 3
        if kind == "transposed":
            values = values.t()
        if kind == "gaps":
            values = torch.randn(WIDTH, 2 * WIDTH)[:, ::2] / 3
        self.weight = nn.Parameter(values)
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.to(self.weight.dtype) @ self.weight + self.bias
        return outputs.tanh()


class RandomModel(nn.Module):
    """Layers of random kinds, and parameters that are unusual.

    Attributes:
        spare: A parameter that no optimizer has at first.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        common = ("plain", "plain", "plain", "bf16", "transposed", "tied")
        kinds = [random.choice(common) for _ in range(random.randint(1, 4))]
        if random.random() < 0.03:
            kinds.append("gaps")
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds)
        for number, kind in enumerate(kinds):
            if kind == "tied":
                self.layers[number].weight = self.layers[0].weight
        self.table: nn.Embedding | None = None
        if random.random() < 0.3:
            self.table = nn.Embedding(9, WIDTH, sparse=random.random() < 0.15)
        extras = {"scale": torch.tensor(1.0), "one": torch.ones(1)}
        extras |= {"empty": torch.zeros(0), "unused": torch.ones(3)}
        self.extras = nn.ParameterDict(
            {
                name: nn.Parameter(value)
                for name, value in extras.items()
                if random.random() < 0.4
            }
        )
        self.spare = nn.Parameter(torch.ones(WIDTH))
        if random.random() < 0.03:
            self.double()
        if random.random() < 0.1:
            self.bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs
        if self.table is not None:
            outputs = outputs + self.table(torch.arange(ROWS) * 2)
        for layer in self.layers:
            outputs = layer(outputs)
        for name, extra in self.extras.items():
            if name != "unused":
                outputs = outputs + extra.sum()
        return outputs * self.spare
