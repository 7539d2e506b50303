"""A small transformer learns to write like Shakespeare, one character at a time, on two workers.

    python examples/character_transformer.py --iterations 600      # 2000 for nanoGPT's length

In nanoGPT's setting for CPUs: a step has 12 blocks of 64 characters, which the workers share. The
validation loss, over the last tenth of the text, is 2.13 after 600 iterations, and 1.79 after 2,000
in four minutes. With first weights that are drawn as nanoGPT's it was 1.91.

Tiny Shakespeare is read from `--data FOLDER`, downloaded into it if need be (1 MB), or read from
the folder that STEEPEST_DATA names; without either, Python's own help texts are learned.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from text import blocks, load_text, write
from torch import nn
from torch.nn import functional as F

from steepest import DistributedSGD, ParameterServerStrategy, TorchModel

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12


class Transformer(nn.Module):
    """Scores of the character that follows each character of a block."""

    def __init__(self, characters: int, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True, bias=False
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width, bias=False), False)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (blocks, length), characters' numbers
        embedded = self.characters(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        mixed = self.layers(embedded, mask, is_causal=True)
        return F.linear(mixed, self.characters.weight).transpose(1, 2)


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW whose weight decay leaves the norms alone."""
    matrices, norms = ([p for p in module.parameters() if p.dim() == n] for n in (2, 1))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))


def learning_rate(step: int, steps: int) -> float:
    """Return a rate that rises to 1e-3 in 100 steps, then falls to 1e-4 along half a cosine."""
    share = (step - 100) / max(steps - 100, 1)
    return 1e-3 * (step + 1) / 101 if share < 0 else 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * share))


def main(argv: Sequence[str] | None = None) -> float:
    """Train, print validation losses and a text of the model's, and return the last loss."""
    parser = argparse.ArgumentParser(description="A transformer on Tiny Shakespeare")
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, help="folder for Tiny Shakespeare's input.txt")
    options = parser.parse_args(argv)
    text = load_text(options.data)
    print(f"{text.source}: {len(text.train):,} characters to train with")
    alphabet = len(text.alphabet)
    train, held_out = blocks(text.train, CONTEXT), blocks(text.validation, CONTEXT, stride=CONTEXT)

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Transformer(alphabet),
            loss=F.cross_entropy,
            data=train,
            batch_size=BATCH,
            optimizer=optimizer,
            learning_rate=lambda step: learning_rate(step, options.iterations),
        )

    clipped = ParameterServerStrategy(clip_norm=1.0)
    with DistributedSGD(create, options.workers, strategy=clipped, global_batch_size=BATCH) as sgd:
        every = max(options.iterations // 4, 1)
        sgd.fit(steps=options.iterations, validation=held_out, evaluate_every=every)
        for result in sgd.evaluations:
            print(f"iteration {result.step:4}: validation loss {result.loss:.3f}")
        trained = Transformer(alphabet)
        trained.load_state_dict(sgd.state_dict())
        print(write(trained, text.alphabet, CONTEXT, length=200))
        return sgd.evaluations[-1].loss


if __name__ == "__main__":
    main()
