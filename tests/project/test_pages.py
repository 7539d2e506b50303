"""The code of the pages that say how to do something runs as it stands, on a simulated Ray or one of its own."""

from __future__ import annotations

import re
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.page_examples import blocks_of, run_block, said_by

ROOT = Path(__file__).resolve().parents[2]


def test_a_ported_loop_ends_with_the_weights_of_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert said_by("howto/from_pytorch.md", monkeypatch) == "equal to rounding: True\n"
    found = said_by("howto/from_pytorch.md", monkeypatch, 1)
    assert re.fullmatch(r"equal to rounding: True accuracy: (0\.9\d+|1\.0)\n", found)


@pytest.mark.long
def test_a_gan_learns_where_its_data_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = eval(said_by("howto/several_losses.md", monkeypatch))
    assert set(seen) == {"discriminator", "generator", "mean"}
    assert 2.0 < seen["mean"] < 4.0  # of the data it is 3, of the first images about 0


class Tied(nn.Module):
    """A language model with the arguments, names and results of transformers' GPT-2, but without attention."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.transformer = nn.Embedding(config.vocab_size, config.n_embd)
        self.mix = nn.Linear(config.n_embd, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.lm_head(self.mix(self.transformer(input_ids)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        found = OrderedDict(loss=loss, logits=logits)
        return types.SimpleNamespace(**found)


def test_a_language_model_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import transformers  # noqa: F401 - the page's
    except ImportError:
        stand_in: Any = types.ModuleType("transformers")
        stand_in.GPT2Config = types.SimpleNamespace
        stand_in.GPT2LMHeadModel = Tied
        monkeypatch.setitem(__import__("sys").modules, "transformers", stand_in)
    assert said_by("howto/hugging_face.md", monkeypatch) == "learned: True\n"


def test_an_average_is_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_by("howto/callbacks.md", monkeypatch) == "after step 20 ['bias', 'weight']\n"


def test_training_goes_on_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_by("howto/stop.md", monkeypatch) == "committed: True one more: 1\n"


@pytest.mark.long
def test_processes_of_one_machine_train_as_their_page_says(tmp_path: Path) -> None:
    (program,) = blocks_of("docs/howto/one_machine.md")
    lines = [line.split() for line in run_block(program, tmp_path).splitlines()]
    assert len(lines) == 40, f"five epochs of 256 samples, 32 a step: {lines}"
    assert float(lines[-1][1]) < float(lines[0][1])
