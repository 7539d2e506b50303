"""A GAN learns eight clusters of points: losses by name, two optimizers, two workers.

    python examples/gan.py --steps 3000

After 3,000 steps it has found all eight, and 77% of its points lie in one of them (of the true
points it is 99%).

docs/howto/several_losses.md says why one backward pass does for both halves.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR

from steepest import DistributedSGD, TorchModel

NOISE = 8  # dimensions of what the generator makes points of
ANGLES = torch.arange(8) * (math.pi / 4)
CENTRES = 2 * torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)
SPREAD = 0.1  # a cluster's standard deviation in each direction


def points(count: int) -> torch.Tensor:
    """Return points (count, 2) of the clusters, the same ones in every process."""
    dice = torch.Generator().manual_seed(0)
    cluster = torch.randint(8, (count,), generator=dice)
    return CENTRES[cluster] + SPREAD * torch.randn(count, 2, generator=dice)


def network(inputs: int, outputs: int) -> nn.Module:
    first, second, last = nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    return nn.Sequential(first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2), last)


class GAN(TorchModel):
    def loss(self, batch: tuple[torch.Tensor]) -> dict[str, torch.Tensor]:
        real = batch[0].requires_grad_()
        generator, discriminator = self.module["generator"], self.module["discriminator"]
        fake = generator(torch.randn(len(real), NOISE))
        constants = {name: weights.detach() for name, weights in discriminator.named_parameters()}
        scores = discriminator(real)
        (slopes,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        return {
            "real": F.softplus(-scores).mean(),
            "fake": F.softplus(discriminator(fake.detach())).mean(),
            "penalty": 0.02 * slopes.square().sum(dim=1).mean(),  # of a discriminator with jumps
            "generator": F.softplus(-functional_call(discriminator, constants, fake)).mean(),
        }


def optimizers(module: nn.ModuleDict) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(module["generator"].parameters(), lr=2e-3, betas=(0.5, 0.99)),
        torch.optim.Adam(module["discriminator"].parameters(), lr=4e-3, betas=(0.5, 0.99)),
    ]


@torch.no_grad()
def generate(model: TorchModel) -> torch.Tensor:
    """Return points (2000, 2) of the generator's."""
    return model.module["generator"](torch.randn(2000, NOISE))


def main(argv: Sequence[str] | None = None) -> tuple[int, float]:
    """Train; return the number of clusters found, and the share of points that are in one."""
    parser = argparse.ArgumentParser(description="A GAN that learns eight clusters of points")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args(argv)

    def create(worker_index: int, device_index: int) -> TorchModel:
        halves = {"generator": network(NOISE, 2), "discriminator": network(2, 1)}
        return GAN(
            nn.ModuleDict(halves),
            data=points(8192),
            batch_size=128,
            optimizer=optimizers,
            lr_scheduler=lambda both: LinearLR(both, 1.0, 0.0, total_iters=options.steps),
        )

    with DistributedSGD(create, num_workers=2) as sgd:
        sgd.fit(steps=options.steps)
        distances, clusters = torch.cdist(sgd.for_model(generate), CENTRES).min(dim=1)
    inside = distances < 3 * SPREAD  # so are 99% of the true points
    counts = clusters[inside].bincount(minlength=8)
    found, share = int((counts >= 40).sum()), float(inside.float().mean())
    print(f"{found} of 8 clusters have 2% or more of the points each; {share:.0%} are in clusters")
    return found, share


if __name__ == "__main__":
    main()
