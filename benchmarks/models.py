"""The workloads of the benchmarks: networks, random data, optimizers, and the loading every rival shares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from steepest.tables.modules.torch_model import TorchModel

LEARNING_RATE = 0.01
ADAM_LEARNING_RATE = 0.001
CLASSES = 10
SEED = 20


class ConvNet(nn.Module):
    """A network of 1,960 parameters for images of 28 x 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, kernel_size=3)
        self.output = nn.Linear(192, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(F.max_pool2d(self.convolution(images), 3))
        return F.log_softmax(self.output(features.flatten(1)), dim=1)


class MLP(nn.Sequential):
    """A perceptron of 25,003,184 parameters: 1024 inputs, three hidden layers of 3286, ten classes."""

    def __init__(self, inputs: int = 1024, hidden: int = 3286) -> None:
        super().__init__(
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, CLASSES),
            nn.LogSoftmax(dim=1),
        )


class CharacterTransformer(nn.Module):
    """A decoder of 10.7 million parameters for texts of 64 characters of 65: six layers of width 384, as nanoGPT's."""

    def __init__(self, characters: int = 65, length: int = 64, width: int = 384) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True, bias=False
        )
        norm = nn.LayerNorm(width, bias=False)
        self.layers = nn.TransformerEncoder(layer, 6, norm, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), False)

    def forward(self, texts: Tensor) -> Tensor:
        """Log probabilities of each next character, (batch, characters, length)."""
        mixed = self.layers(self.characters(texts) + self.places.weight, self.mask, is_causal=True)
        return F.log_softmax(F.linear(mixed, self.characters.weight).transpose(1, 2), dim=1)


def sgd(network: nn.Module, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, fused=fused)


def adam(network: nn.Module, fused: bool | None = True) -> torch.optim.Optimizer:
    """Fused, which is the fastest that torch has; steepest is given ``fused=None`` and chooses by itself."""
    return torch.optim.Adam(network.parameters(), lr=ADAM_LEARNING_RATE, fused=fused)


def adamw(network: nn.Module, fused: bool | None = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=ADAM_LEARNING_RATE, fused=fused)


class Modelled(Protocol):
    """What a job of steepest can train."""

    def model(self) -> TorchModel:
        """Return the model of one replica."""


@dataclass(frozen=True)
class Workload:
    """A network, the shape of its data, its optimizer; ``steps`` is the default number of steps in one round.

    Samples are random numbers, each with a class; or, where they have ``words``, whole numbers below that, each with
    the one that follows it.
    """

    name: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    samples: int
    steps: int
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    words: int | None = None

    def build(self) -> nn.Module:
        """The network, with the same initial weights in every process."""
        torch.manual_seed(SEED)
        return self.network()

    def data(self) -> tuple[Tensor, Tensor]:
        """Random inputs and labels, the same in every process."""
        generator = torch.Generator().manual_seed(SEED)
        if self.words is not None:
            shape = self.samples, self.shape[0] + 1, *self.shape[1:]
            text = torch.randint(self.words, shape, generator=generator)
            return text[:, :-1], text[:, 1:]
        x = torch.randn(self.samples, *self.shape, generator=generator)
        y = torch.randint(CLASSES, (self.samples,), generator=generator)
        return x, y

    def batches(self, worker: int) -> Batches:
        """The batches of one worker, shuffled in its own order."""
        return Batches(*self.data(), self.batch_size, seed=SEED + worker)

    def model(self) -> TorchModel:
        """The network and its data as steepest trains them."""
        from steepest.tables.modules.torch_model import TorchModel

        return TorchModel(
            self.build(),
            loss=F.nll_loss,
            data=self.data(),
            batch_size=self.batch_size,
            optimizer=functools.partial(self.optimizer, fused=None),
        )

    def parameters(self) -> int:
        return sum(p.numel() for p in self.network().parameters())


class Batches:
    """An endless run of batches: each one indexes the data by the next part of a shuffled permutation."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, seed: int) -> None:
        self._x, self._y, self._size = x, y, batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long)
        self._next = 0

    def next(self) -> tuple[Tensor, Tensor]:
        if self._next + self._size > len(self._order):
            self._order = torch.randperm(len(self._x), generator=self._generator)
            self._next = 0
        indices = self._order[self._next : self._next + self._size]
        self._next += self._size
        return self._x[indices], self._y[indices]


def compute(network: nn.Module, batches: Batches) -> None:
    """The computation of one step: load a batch, clear the gradients, forward, backward."""
    x, y = batches.next()
    network.zero_grad()
    F.nll_loss(network(x), y).backward()


WORKLOADS = {
    w.name: w
    for w in (
        Workload("convnet", ConvNet, (1, 28, 28), batch_size=128, samples=4096, steps=120),
        Workload("mlp", MLP, (1024,), batch_size=8, samples=512, steps=6),
        Workload("mlp-adam", MLP, (1024,), batch_size=8, samples=512, steps=6, optimizer=adam),
        Workload("transformer", CharacterTransformer, (64,), 4, 512, 6, optimizer=adamw, words=65),
    )
}
