"""The transformer learns more than frequencies; its text is downloaded once, refused if damaged."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest.core.config.run import data_directory
from tests.example_modules import imported

SHARED = data_directory() or Path("/nowhere")

needs_shakespeare = pytest.mark.skipif(
    not (SHARED / "tinyshakespeare").is_dir(), reason="needs tinyshakespeare/ in STEEPEST_DATA"
)


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, Any]]:
    with imported("character_transformer") as found:
        yield found


def table_losses(text: Any) -> tuple[float, float]:
    """The validation losses of two tables that have counted characters, and pairs of them."""
    size = len(text.alphabet)
    pairs = text.train[:-1] * size + text.train[1:]
    counts = pairs.bincount(minlength=size * size).view(size, size).double() + 0.01
    single = counts.sum(dim=0) / counts.sum()
    following = counts / counts.sum(dim=1, keepdim=True)
    first, second = text.validation[:-1], text.validation[1:]
    return tuple(
        float(-chances.log().mean()) for chances in (single[second], following[first, second])
    )


@pytest.mark.full
@needs_shakespeare
@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_the_transformer_soon_knows_more_than_how_frequent_characters_are(
    examples: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = examples["character_transformer"]
    whole = example.load_text()
    text = whole._replace(validation=whole.validation[:5000])  # so that evaluations are short
    monkeypatch.setattr(example, "load_text", lambda folder: text)
    reached = example.main(["--iterations", "48"])
    assert reached < table_losses(text)[0] - 0.1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Shakespeare: 1,003,854 characters to train with"
    losses = [line.split() for line in printed[1:5]]
    assert [line[1] for line in losses] == ["12:", "24:", "36:", "48:"]
    assert losses[-1][-1] == f"{reached:.3f}"
    assert len("\n".join(printed[5:])) == 200


@needs_shakespeare
@pytest.mark.full
@pytest.mark.usefixtures("machine")
def test_the_transformer_comes_as_far_as_it_says(examples: dict[str, Any]) -> None:
    signal.alarm(900)  # instead of the usual deadline: 2,000 iterations take over a minute
    example = examples["character_transformer"]
    assert example.main(["--iterations", "2000"]) <= 1.9 < table_losses(example.load_text())[1]


def test_pythons_help_stands_in_for_shakespeare(
    examples: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEEPEST_DATA", raising=False)
    text = examples["character_transformer"].load_text()
    assert "help" in text.source
    assert len(text.train) > 100_000
    encoded = torch.cat([text.train, text.validation])
    assert encoded.unique().tolist() == list(range(len(text.alphabet)))
    assert len(text.train) == int(0.9 * len(encoded))


def test_blocks_cover_a_text_and_are_followed_by_it(examples: dict[str, Any]) -> None:
    text = torch.arange(10)
    inputs, targets = examples["character_transformer"].blocks(text, 3)
    assert inputs.tolist() == [[i, i + 1, i + 2] for i in range(7)]
    assert targets.tolist() == (inputs + 1).tolist()
    inputs, _ = examples["character_transformer"].blocks(text, 3, stride=3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_the_learning_rate_rises_and_falls(examples: dict[str, Any]) -> None:
    rates = [examples["character_transformer"].learning_rate(step, 2000) for step in range(2001)]
    assert rates[0] == pytest.approx(1e-3 / 101)
    assert rates[:101] == sorted(rates[:101])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert (rates[100], rates[2000]) == (pytest.approx(1e-3), pytest.approx(1e-4))


@needs_shakespeare
def test_a_file_is_downloaded_once_and_checked(
    examples: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import text

    monkeypatch.delenv("STEEPEST_DATA")
    origin = SHARED / "tinyshakespeare" / "input.txt"
    folder = tmp_path / "cache"
    monkeypatch.setattr(text, "URL", origin.resolve().as_uri())
    first = text.load_text(folder)
    monkeypatch.setattr(text, "URL", (tmp_path / "nothing").as_uri())
    again = text.load_text(folder)
    assert [path.name for path in folder.iterdir()] == ["input.txt"]
    assert first.source == again.source == "Shakespeare"
    assert torch.equal(first.train, again.train)
    assert len(again.alphabet) == 65

    damaged = folder / "input.txt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"input\.txt is damaged"):
        text.load_text(folder)
