"""ResNet-50 (He et al., arXiv:1512.03385, with the stride in the 3 x 3 convolution), as
torchvision builds it."""

from __future__ import annotations

import torch
from torch import nn

# Width, blocks and stride of each stage.
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = (
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv_2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.conv_3, self.norm_3 = (
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut: nn.Module | None = None
        if inputs != 4 * width:
            projection = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(4 * width))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.relu(self.norm_2(self.conv_2(y)))
        y = self.norm_3(self.conv_3(y))
        if self.shortcut is not None:
            identity = self.shortcut(x)
        y += identity
        return self.relu(y)


class ResNet50(nn.Module):
    """The network, for images of 3 x 224 x 224 and 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        blocks, inputs = [], 64
        for width, count, stride in _STAGES:
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, stride if index == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.average, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.norm(self.conv(x))))
        return self.head(torch.flatten(self.average(self.blocks(x)), 1))
