"""Two models without a repeated layer as long as a transformer's: ResNet-152 and a U-Net.

Functions as `shardwright plan benchmarks/vision.py:resnet152` takes them; weights and images are on
the meta device. Sources: He et al., CVPR 2016, table 1 (with the stride in the 3x3
convolution, as torchvision has it); Ronneberger et al., MICCAI 2015, figure 1 (padded, with
normalization), at 512 x 512.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a shortcut; [rows, inputs, h, w] to [rows, 4 width, h / stride, ...]."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [rows, 3, h, w] and labels [rows] to the mean loss."""

    def __init__(self, depths: Sequence[int] = (3, 8, 36, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        stages, inputs = [], 64
        for stage, depth in enumerate(depths):
            blocks = []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(inputs, 64 * 2**stage, stride))
                inputs = 64 * 2**stage * EXPANSION
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(images))), 3, 2, 1)
        for stage in self.stages:
            x = stage(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Convolutions(nn.Sequential):
    """Two 3x3 convolutions, each normalized."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Images [rows, 3, h, w] and labels [rows, h, w] to the mean loss; skips at every level."""

    def __init__(
        self, widths: Sequence[int] = (64, 128, 256, 512, 1024), classes: int = 21
    ) -> None:
        super().__init__()
        sizes = [3, *widths]
        self.down = nn.ModuleList(
            Convolutions(a, b) for a, b in zip(sizes, sizes[1:], strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 2, 2) for b, a in zip(widths, widths[1:], strict=False)
        )
        self.join = nn.ModuleList(Convolutions(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = images
        for level, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return functional.cross_entropy(self.head(x), labels)


def resnet152() -> tuple[nn.Module, tuple[Any, ...], dict[str, Tensor]]:
    """ResNet-152, 60 million parameters, on 8 images of 224 x 224."""
    with torch.device("meta"):
        images, labels = torch.empty(8, 3, 224, 224), torch.empty(8, dtype=torch.int64)
        return ResNet(), (), {"images": images, "labels": labels}


def unet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Tensor]]:
    """A U-Net of 31 million parameters, on 8 images of 512 x 512."""
    with torch.device("meta"):
        images = torch.empty(8, 3, 512, 512)
        labels = torch.empty(8, 512, 512, dtype=torch.int64)
        return UNet(), (), {"images": images, "labels": labels}
