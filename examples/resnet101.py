"""ResNet-101 on random images, timed step by step: the old Ray SGD's example, with its options.

    python examples/resnet101.py                                                # two workers, on CPUs
    python examples/resnet101.py --strategy allreduce --num-workers 4 --gpu     # four GPUs

A step is one batch on every replica. `--small` trains a small network of the same kind instead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from steepest import DistributedSGD, TorchModel


def convolution(channels: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    kernel = nn.Conv2d(channels, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(channels, width, 1)
        self.second = convolution(width, width, 3, stride)
        self.third = convolution(width, 4 * width, 1)
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else convolution(channels, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.third(F.relu(self.second(F.relu(self.first(x)))))
        return F.relu(y + self.shortcut(x))


def resnet(blocks: Sequence[int] = (3, 4, 23, 3), width: int = 64) -> nn.Sequential:
    """ResNet-101 by default (He et al. 2016): 44,549,160 parameters. (3, 4, 6, 3) is ResNet-50."""
    layers = [convolution(3, width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(channels, width << stage, stride))
            channels = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def model_creator(small: bool, batch_size: int) -> Callable[[int, int], TorchModel]:
    def create(worker_index: int, device_index: int) -> TorchModel:
        pixels, count = (32, 256) if small else (224, 64)
        images = torch.randn(count, 3, pixels, pixels)  # the same ones in every process
        return TorchModel(
            resnet((1, 1, 2, 1), width=16) if small else resnet(),
            loss=F.cross_entropy,
            data=(images, torch.randint(1000, (count,))),
            batch_size=batch_size,
            optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.003, momentum=0.9),
        )

    return create


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4, help="images for each device and step")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--devices-per-worker", type=int, default=1)
    parser.add_argument("--strategy", default="ps", help="ps, allreduce, simple, local, async, ssp")
    parser.add_argument("--gpu", action="store_true", help="one for each device")
    parser.add_argument("--small", action="store_true", help="a small network, 32 x 32 pixels")
    options = parser.parse_args(argv)

    with DistributedSGD(
        model_creator(options.small, options.batch_size),
        num_workers=options.num_workers,
        devices_per_worker=options.devices_per_worker,
        gpu=options.gpu,
        strategy=options.strategy,
    ) as sgd:
        sgd.warmup()
        for _ in range(options.num_iters):
            began = time.perf_counter()
            result = sgd.step()
            rate = result.samples / (time.perf_counter() - began)
            print(f"step {result.step}: {rate:.1f} images/s, loss {result.loss:.3f}", flush=True)
        mean = sgd.stats().samples_per_second
    print(f"mean: {mean:.1f} images/s")
    return mean


if __name__ == "__main__":
    main()
