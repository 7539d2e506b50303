"""A Wasserstein GAN with a gradient penalty draws digits: two optimizers, one stepped more often than the other.

    python examples/own_loop_gan.py                          # one process, plain PyTorch
    python examples/own_loop_gan.py --workers 2              # the same function on two workers

A loop of the user's own: the critic takes a step for each batch, the generator for each third one. Their
means are alike to 0.98 (their correlation) after 12 epochs. Needs `pip install 'steepest[demo]'`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

import steepest

NOISE = 16


def network(inputs: int, outputs: int, *last: nn.Module) -> nn.Module:
    first, second = nn.Linear(inputs, 128), nn.Linear(128, 128)
    return nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), nn.Linear(128, outputs), *last)


def penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return how far the critic's slopes between real and drawn digits are from 1."""
    between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
    (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slopes.norm(dim=1) - 1).square().mean()


@torch.no_grad()
def likeness(digits: torch.Tensor, generator: nn.Module) -> float:
    """Return the correlation of the mean drawn digit with the mean real one."""
    drawn = generator(torch.randn(500, NOISE, generator=torch.Generator().manual_seed(1)))
    return torch.corrcoef(torch.stack([drawn.mean(0), digits.mean(0)]))[0, 1].item()


def train(epochs: int, batch_size: int) -> float:
    """Train; return how alike drawn and real digits are in the mean."""
    digits = torch.as_tensor(load_digits().data).float() / 16
    loader = DataLoader(TensorDataset(digits), batch_size=batch_size, shuffle=True, drop_last=True)
    generator, critic = network(NOISE, 64, nn.Sigmoid()), network(64, 1)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, critic, of_generator, of_critic, loader = steepest.prepare(
        generator, critic, of_generator, of_critic, loader
    )
    alike = 0.0
    for epoch in steepest.epochs(epochs):
        for number, (real,) in enumerate(loader):
            of_critic.zero_grad()
            fake = generator(torch.randn(len(real), NOISE)).detach()
            distance = critic(real).mean() - critic(fake).mean()
            (10 * penalty(critic, real, fake) - distance).backward()
            of_critic.step()
            if number % 3 == 0:
                of_generator.zero_grad()
                (-critic(generator(torch.randn(len(real), NOISE))).mean()).backward()
                of_generator.step()
        alike = likeness(digits, generator)
        steepest.report(distance=distance, alike=alike)
        if steepest.rank() == 0:
            print(f"epoch {epoch}: distance {distance.item():.2f}, alike {alike:.2f}")
    return alike


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--workers", type=int, default=0, help="0 for none: the script by itself")
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    function = functools.partial(train, chosen.epochs, chosen.batch_size)
    if chosen.workers == 0:
        return function()
    return steepest.run(function, num_workers=chosen.workers).metrics["alike"]


if __name__ == "__main__":
    main()
