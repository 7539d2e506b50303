"""Generated clicks are the same wherever they are made, follow their law, and have a bound."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from benchmarks.clicks import FEATURES, NUMBERS, Clicks, Samples, auc
from steepest.core.data.sources import as_source

COUNT = 200_000


@pytest.fixture(scope="module")
def made() -> Samples:
    return Clicks(COUNT).samples(0, COUNT)


def test_any_part_is_the_same_wherever_it_is_made(made: Samples) -> None:
    part = Clicks(1).samples(1000, 1500)
    for ours, whole in zip(part, made, strict=True):
        np.testing.assert_array_equal(ours, whole[1000:1500])
    elsewhere = Clicks(10, begin=1400)
    shares = [np.array([7, 3]), np.array([0])]
    (ids, numbers, labels), (last, _, _) = elsewhere.open(shares)
    assert torch.equal(ids, torch.from_numpy(made.ids[[1407, 1403]]))
    assert torch.equal(numbers, torch.from_numpy(made.numbers[[1407, 1403]]))
    assert torch.equal(labels, torch.from_numpy(made.labels[[1407, 1403]]))
    assert torch.equal(last, torch.from_numpy(made.ids[[1400]]))
    assert not np.isin(Clicks(1, seed=1).samples(0, 100).ids, made.ids).any()


def test_every_machine_makes_these() -> None:
    """The bytes of the first samples, as they were when figures were published."""
    ids, numbers, labels, _ = Clicks(1).samples(0, 1000)
    digest = hashlib.sha256(ids.astype("<i8").tobytes() + numbers.astype("<f4").tobytes())
    assert digest.hexdigest()[:16] == "69e9d472f5b9f0a5"
    assert labels.sum() == 272


def test_ids_follow_the_power_law(made: Samples) -> None:
    assert made.ids.shape == (COUNT, FEATURES)
    assert made.ids.min() >= 0
    assert made.ids.max() > 2**62
    clicks = Clicks(1)
    for feature in (0, 25):
        column = made.ids[:, feature]
        for rank in (1, 2, 3, 10, 100):
            expected = COUNT * (rank**-0.2 - (rank + 1) ** -0.2)
            found = (column == clicks.id_of(feature, rank)).sum()
            assert abs(found - expected) < 5 * expected**0.5
    of_features = [set(made.ids[:, feature].tolist()) for feature in range(FEATURES)]
    assert len(set.union(*of_features)) == sum(map(len, of_features))  # none in common
    once = COUNT * 2.0 ** (-53 / 5)
    counts = np.unique(made.ids[:, 0], return_counts=True)[1]
    assert (counts == 1).sum() > 100 * once  # the vocabulary is open


def test_numbers_have_mean_0_and_deviation_1(made: Samples) -> None:
    assert made.numbers.shape == (COUNT, NUMBERS)
    np.testing.assert_allclose(made.numbers.mean(0), 0, atol=5 * COUNT**-0.5)
    np.testing.assert_allclose(made.numbers.std(0), 1, atol=0.01)
    others = np.corrcoef(made.numbers.T) - np.eye(NUMBERS)
    assert np.abs(others).max() < 5 * COUNT**-0.5


def test_labels_are_drawn_from_the_hidden_model(made: Samples) -> None:
    """Its probabilities are right in each range of them, so no order of samples is better."""
    probabilities = 1 / (1 + np.exp(-made.logits))
    for part in np.array_split(np.argsort(probabilities), 20):
        expected = probabilities[part]
        error = made.labels[part].sum() - expected.sum()
        assert abs(error) < 5 * (expected * (1 - expected)).sum() ** 0.5
    bound = auc(made.logits, made.labels)
    assert 0.81 < bound < 0.83
    noise = np.random.default_rng(0).normal(size=COUNT)
    assert auc(made.logits + 0.3 * noise, made.labels) < bound - 0.001


def test_auc_is_what_counting_pairs_gives() -> None:
    random = np.random.default_rng(0)
    scores, labels = random.integers(0, 10, 200), random.integers(0, 2, 200).astype(np.float32)
    above = np.sign(scores[labels == 1][:, None] - scores[labels == 0][None])
    assert auc(scores, labels) == pytest.approx((above.mean() + 1) / 2)


def test_a_trainer_takes_them_as_data() -> None:
    clicks = Clicks(10)
    assert as_source(clicks, 4) == (clicks, 4)
