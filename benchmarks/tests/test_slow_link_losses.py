"""Jobs in one thread that measure what rounds of local SGD do to losses."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from benchmarks.federated import rounds_to
from benchmarks.slow_link_losses import SYNCHRONOUS, Task, contenders
from examples.text import Text


@pytest.fixture
def task() -> Task:
    letters = "abcd" * 100
    numbers = torch.tensor(["abcd".index(letter) for letter in letters])
    options = argparse.Namespace(
        workers=2, batch=2, iterations=32, layers=1, width=8, context=4, seed=0
    )
    return Task(Text("letters", "abcd", numbers[:300], numbers[300:]), options)


def test_all_contenders_learn_what_follows_each_letter(task: Task) -> None:
    warm = task.train(SYNCHRONOUS, 0, 8, None)
    untrained = task.loss(task.network(None).state_dict())
    assert untrained > 0.5 * math.log(4)
    for strategy in contenders(8, 1).values():
        weights = task.train(strategy or SYNCHRONOUS, 8, 32, warm)
        assert task.loss(weights) < untrained


def test_rounds_are_counted_until_so_many_digits_are_known() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(1200, 784), torch.arange(1200) % 2
    x[:, 0] += 8 * y
    digits = (x, y)
    found = rounds_to(0.9, digits, digits, clients=2, rate=0.05)
    assert found is not None
    assert 1 <= found <= 3
