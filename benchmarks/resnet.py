"""ResNet (He et al. 2016, arXiv:1512.03385) of bottleneck blocks, with the stride in the 3 x 3 convolution."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """A 1 x 1, a 3 x 3 and a 1 x 1 convolution beside a shortcut; the output has four times `width` channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.first = convolution(channels, width, 1)
        self.second = convolution(width, width, 3, stride)
        self.third = convolution(width, outputs, 1)
        changes = stride != 1 or channels != outputs
        self.shortcut = convolution(channels, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(F.relu(self.second(F.relu(self.first(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-101 by default: 44,549,160 parameters; gives logarithms of probabilities.

    Args:
        blocks: of each stage; from the second on a stage halves height and width.
        width: channels of the first convolution; the narrow ones of each stage are so many, twice
            as many, ...
    """

    def __init__(
        self, blocks: tuple[int, ...] = (3, 4, 23, 3), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = convolution(3, width, 7, stride=2)
        channels, stages = width, []
        for stage, count in enumerate(blocks):
            narrow = width << stage
            for block in range(count):
                stages.append(Bottleneck(channels, narrow, stride=2 if stage and not block else 1))
                channels = EXPANSION * narrow
        self.stages = nn.Sequential(*stages)
        self.output = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1))
        return F.log_softmax(self.output(features.mean(dim=(2, 3))), dim=1)


def convolution(channels: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias, and batch normalisation."""
    kernel = nn.Conv2d(channels, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs))
