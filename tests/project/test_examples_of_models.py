"""The examples of models: each learns what its data hold, and not by chance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steepest.core.config.run import data_directory
from tests.example_modules import imported
from tests.simulation.run import Simulation

SHARED = data_directory() or Path("/nowhere")

needs_a9a = pytest.mark.skipif(not (SHARED / "a9a").is_dir(), reason="needs a9a/ in STEEPEST_DATA")


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, Any]]:
    with imported("a9a_logistic_regression", "detection", "gan") as found:
        yield found


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers are threads of this process, whose memory is left as it is."""
    monkeypatch.setattr("steepest.runtime.process.keep_freed_memory", lambda: False)
    with Simulation(1).running():
        yield


# -- logistic regression ---------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.long
@needs_a9a
@pytest.mark.usefixtures("simulated")
def test_a9a_comes_near_its_optimum(examples: dict[str, Any]) -> None:
    above = examples["a9a_logistic_regression"].main(["--steps", "100"])
    assert 0 < above < 1e-2  # without weights it is 0.37


@needs_a9a
@pytest.mark.full
@pytest.mark.usefixtures("machine")
def test_a9a_comes_to_its_optimum(examples: dict[str, Any]) -> None:
    above = examples["a9a_logistic_regression"].main([])
    assert 0 < above < 1e-6


@pytest.mark.full
@needs_a9a
def test_the_optimum_of_a9a_is_the_one_that_came_with_it(examples: dict[str, Any]) -> None:
    data = examples["a9a_logistic_regression"].load()
    assert data.x.shape == (32561, 123)
    assert data.x.sum() == 451_592
    assert (data.y == 1).sum() == 7841
    assert f"f* = {data.optimum}" in (SHARED / "a9a" / "SOURCE.txt").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("simulated")
def test_tumours_stand_in_for_a9a(
    examples: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    monkeypatch.delenv("STEEPEST_DATA", raising=False)
    example = examples["a9a_logistic_regression"]
    _, x, y, optimum = example.load()
    decay = example.DECAY
    solver = linear_model.LogisticRegression(
        C=1 / (decay * len(x)), fit_intercept=False, solver="newton-cholesky", tol=1e-12
    )
    weights = solver.fit(x.numpy(), y.numpy()).coef_[0]
    loss = np.logaddexp(0, -y.numpy() * (x.numpy() @ weights)).mean()
    assert optimum == pytest.approx(loss + decay / 2 * (weights**2).sum(), abs=1e-10)
    assert 0 < example.main(["--steps", "600"]) < 1e-3


# -- a detector ------------------------------------------------------------------------------------


def test_pictures_of_different_sizes_are_padded_to_one(examples: dict[str, Any]) -> None:
    example = examples["detection"]
    samples = [example.picture(number) for number in range(6)]
    assert len({image.shape for image, _, _ in samples}) == 6
    images, kinds, boxes = example.collate(samples)
    assert kinds.tolist() == [0, 1] * 3
    for padded, (image, _, box), found in zip(images, samples, boxes, strict=True):
        height, width = image.shape
        assert torch.equal(padded[0, :height, :width], image)
        assert not padded[0, height:].any()
        assert not padded[0, :, width:].any()
        assert torch.equal(box, found)
        top, left, bottom, right = found.round().long().tolist()
        assert 0 <= top < bottom <= height
        assert 0 <= left < right <= width
        outside = image.clone()
        outside[top:bottom, left:right] = 0
        assert image[top:bottom, left:right].mean() > 0.6  # the shape is where its box is
        assert outside.mean() < 0.05
    assert all(side % example.CELL == 0 for side in images.shape[2:])


def test_a_box_is_read_where_it_was_written(examples: dict[str, Any]) -> None:
    example = examples["detection"]
    output = torch.zeros(2, 7, 4, 5)
    output[1, 1:, 2, 3] = torch.tensor([7.0, 8.0, -0.5, -1.0, 0.5, 1.0])
    scores, boxes = example.at(output, torch.tensor([0, 2 * 5 + 3]))
    assert scores.tolist() == [[0, 0], [7, 8]]
    assert boxes.tolist() == [[0, 0, 0, 0], [12, 16, 20, 32]]


@pytest.mark.long
@pytest.mark.usefixtures("simulated")
def test_shapes_are_found_and_named(
    examples: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = examples["detection"].main(["--epochs", "2"])
    assert found.samples == 500
    assert set(found.metrics) == {"place", "kind", "box", "accuracy", "iou"}
    assert found.loss == pytest.approx(
        sum(found.metrics[name] for name in ("place", "kind", "box"))
    )
    assert found.metrics["accuracy"] > 0.7
    assert found.metrics["iou"] > 0.5  # a box in the middle of a picture has about 0.1
    said = f"accuracy {found.metrics['accuracy']:.1%}, mean IoU {found.metrics['iou']:.2f}\n"
    assert capsys.readouterr().out == said


# -- a GAN -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.long
@pytest.mark.usefixtures("simulated")
def test_a_gan_finds_clusters(examples: dict[str, Any]) -> None:
    clusters, share = examples["gan"].main(["--steps", "400"])
    assert clusters >= 4
    assert share > 0.2  # of a square with all clusters they cover 0.11


@pytest.mark.full
@pytest.mark.usefixtures("machine")
def test_a_gan_finds_all_clusters(examples: dict[str, Any]) -> None:
    clusters, share = examples["gan"].main([])
    assert clusters == 8
    assert share > 0.7
