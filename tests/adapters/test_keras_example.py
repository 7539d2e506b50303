"""The example of a Keras model: digits are learned, though a worker is killed on the way."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

import re

from tests.adapters.keras_tools import compute_in

import pytest

from tests.example_modules import imported

pytestmark = pytest.mark.usefixtures("machine")


def test_digits_are_learned_though_a_worker_is_killed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEEPEST_DATA", raising=False)
    compute_in("float32")
    with imported("mnist_keras") as examples:
        accuracy = examples["mnist_keras"].main(["--epochs", "10"])
    printed = capsys.readouterr().out
    assert accuracy > 0.95  # by chance 0.1
    assert printed.startswith("scikit-learn's digits, for want of MNIST: 1,437 images")
    assert re.search(r"^step 5: kill process \d+$", printed, re.MULTILINE)
    assert re.search(
        r"^test accuracy 9[\d.]+%, loss [\d.]+; events: replaced$", printed, re.MULTILINE
    )
