"""Texts as numbers for the examples: Tiny Shakespeare, or Python's own help texts."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from download import read

COMMIT = "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
URL = f"https://raw.githubusercontent.com/karpathy/char-rnn/{COMMIT}/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class Text(NamedTuple):
    """The first nine tenths of a text to train with, the rest to validate; int64 indices."""

    source: str
    alphabet: str
    train: torch.Tensor
    validation: torch.Tensor


def load_text(folder: Path | None = None) -> Text:
    """Return Tiny Shakespeare from `folder` or from STEEPEST_DATA, whichever has it.

    Where neither has it, it is downloaded into `folder`; without a folder, the help texts of
    Python's `help()` take its place.
    """
    content = read("tinyshakespeare/input.txt", URL, SHA256, folder)
    source = "Python's help texts, for want of Shakespeare" if content is None else "Shakespeare"
    text = "\n".join(topics.values()) if content is None else content.decode()
    alphabet = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    encoded = torch.tensor([numbers[character] for character in text])
    border = int(len(text) * 0.9)
    return Text(source, alphabet, encoded[:border], encoded[border:])


def blocks(text: torch.Tensor, length: int, stride: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks of a text, and for each of their characters the one that follows.

    Args:
        text: (n,) characters as numbers.
        length: of a block.
        stride: from the begin of one block to that of the next.

    Returns:
        Two views (blocks, length) of the text's memory.
    """
    with_next = text.unfold(0, length + 1, stride)
    return with_next[:, :-1], with_next[:, 1:]


@torch.no_grad()
def write(module: torch.nn.Module, alphabet: str, context: int, length: int) -> str:
    """Return a text that a model writes, each character drawn from its distribution.

    Args:
        module: returns scores (1, characters, n) of what follows each of n characters.
        alphabet: the character of each number.
        context: the largest n.
        length: of the text.
    """
    written = torch.zeros(1, dtype=torch.int64)
    for _ in range(length):
        chances = module(written[None, -context:])[0, :, -1].softmax(0)
        written = torch.cat([written, torch.multinomial(chances, 1)])
    return "".join(alphabet[number] for number in written[1:].tolist())
