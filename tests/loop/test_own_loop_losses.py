"""Losses of own loops that are the mean over their samples, and such as are not: these are told by name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steepest
from steepest.loop.loss_looks import LossLooks
from tests.own_loop_runs import STRATEGIES, come, run
from tests.own_loops import Parts, Script
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet

WORKERS, SAMPLES = 3, 13  # batches of 6, 6 and 1, which workers split as 2/2/2 and 1/0/0
CLASSES = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

#: A loss of a model's outputs, four for each sample, and of as many targets.
Loss = Callable[[torch.Tensor, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()


MODEL = net()


def penalty() -> torch.Tensor:
    """A part of a loss that does not depend on samples."""
    return torch.stack([each.square().sum() for each in MODEL.parameters()]).sum()


def labels(y: torch.Tensor) -> torch.Tensor:
    """A class for each sample, which some batches lack."""
    return y.argmax(1)


def tokens(y: torch.Tensor) -> torch.Tensor:
    """A class for each number, or that it is ignored."""
    return torch.where(y > 0, 1, -100).flatten()


def of_each(o: torch.Tensor) -> torch.Tensor:
    """Two outcomes for each number, as logits."""
    return torch.stack([o.flatten(), -o.flatten()], 1)


def half(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.5 * F.mse_loss(o, y, reduction="sum")


def named(way: str, loss: Loss, *words: str) -> Any:
    return pytest.param(loss, *words, id=way)


MEANS = [
    named("mean", F.mse_loss),
    named("times a number", lambda o, y: 0.5 * F.mse_loss(o, y)),
    named("penalty", lambda o, y: F.mse_loss(o, y) + 1e-2 * penalty()),
    named("penalty by its root", lambda o, y: F.mse_loss(o, y) + penalty().sqrt()),
    named("sum by samples", lambda o, y: F.mse_loss(o, y, reduction="sum") / len(o)),
    named("sum times a part", lambda o, y: (o - y).square().sum() * (0.3 / len(o)) + penalty()),
    named("mean of sums", lambda o, y: F.mse_loss(o, y, reduction="none").sum(1).mean()),
    named("masked", lambda o, y: ((o - y).square() * (y > 0)).mean()),
    named("classes", lambda o, y: F.cross_entropy(o, labels(y), label_smoothing=0.1)),
    named("probabilities", lambda o, y: F.cross_entropy(o, y.softmax(1))),
    named("divergence", lambda o, y: F.kl_div(o, y.softmax(1), reduction="batchmean")),
    named("weights of outputs", lambda o, y: F.huber_loss(o * CLASSES, y)),
    named("list", lambda o, y: sum(F.mse_loss(a, b) for a, b in zip(o, y, strict=True)) / len(o)),
    named("stack", lambda o, y: torch.stack([a.square().sum() for a in o - y]).mean()),
    named("scaled by a count of its own", lambda o, y: F.mse_loss(o, y) * next(COUNT)),
    named("zero", lambda o, y: F.mse_loss(o, y) + 0.0 * (o - y).square().sum()),
    named("two", lambda o, y: [F.mse_loss(o, y), F.l1_loss(o, y)]),
    named("of each sample", lambda o, y: [a.square().mean() / len(o) for a in (o - y).split(1)]),
    named("by parts", lambda o, y: [a.square().mean() * len(a) / len(o) for a in (o - y).split(2)]),
]
COUNT = iter(range(1, 1000))

SUM, FUNCTION = "the same factor, .* adds up samples", "of a number of all samples in its batch"
WEIGHTS = r"a mean over other numbers than samples \({}\)"
NO_MEANS = [
    named("half a sum, and a penalty", lambda o, y: half(o, y) + penalty(), "MseLoss .*" + SUM),
    named("a sum and a mean", lambda o, y: F.mse_loss(o, y) + 0.1 * half(o, y), "MseLoss .*" + SUM),
    named("by hand", lambda o, y: 0.1 * (o - y).square().sum(), r"sum\(\) .*" + SUM),
    named("of a list", lambda o, y: sum(each.square().mean() for each in o - y), SUM),
    named("product", lambda o, y: 0.1 * (o - y).flatten().dot((o - y).flatten()), SUM),
    named("norm", lambda o, y: (o - y).norm() + penalty(), r"vectornorm\(\) " + FUNCTION),
    named("root", lambda o, y: F.mse_loss(o, y).sqrt(), r"sqrt\(\) " + FUNCTION),
    named("largest", lambda o, y: (o - y).abs().max(), r"max\(\) " + FUNCTION),
    named("quotient", lambda o, y: o.square().sum() / (o.abs().sum() + 1), FUNCTION),
    named(
        "of each other", lambda o, y: F.cross_entropy(o @ y.T, torch.arange(len(o))), "each other"
    ),
    named(
        "class weights",
        lambda o, y: F.cross_entropy(o, labels(y), CLASSES),
        WEIGHTS.format("NllLoss"),
    ),
    named(
        "ignored", lambda o, y: F.cross_entropy(of_each(o), tokens(y)), WEIGHTS.format("NllLoss")
    ),
    named("mask", lambda o, y: (o * (y > 0)).sum() / (y > 0).sum(), WEIGHTS.format(r"sum\(\)")),
    named("chosen", lambda o, y: (o - y).square()[y > 0].mean(), WEIGHTS.format(r"mean\(\)")),
    named(
        "own weights",
        lambda o, y: (o.mean(1) * y[:, 0].abs()).sum() / y[:, 0].abs().sum(),
        WEIGHTS.format(r"sum\(\)"),
    ),
    named(
        "of each sample",
        lambda o, y: [each.square().mean() for each in o - y],
        "for each of the . samples of a batch, .* factor, 1: .* divide by what the batch has",
    ),
    named(
        "of each sample, halved",
        lambda o, y: [each.square().mean() / 2 for each in o - y],
        "for each of the . samples of a batch, .* (factor, 0.5|divided by 2): ",
    ),
]


def looked(loss: Loss, sizes: Any, *, sums: bool = False) -> list[str]:
    """What is said of a loss, by a worker that has batches of these sizes."""
    x, y = samples(sum(sizes), 3, 4)
    looks, texts, at = LossLooks(), [], 0
    for size in sizes:
        looks.begin(0, size)
        if looks.is_looking:
            found = loss(MODEL(x[at : at + size]), y[at : at + size])
            for each in found if isinstance(found, list) else [found]:
                looks.see(each)
            texts.append(looks.end(size, sums=sums))
        at += size
    return [text for text in texts if text]


SIZES = [(2, 2, 1), (2, 2, 2, 1), (4, 4, 4, 3), (7, 7, 2), (1, 3)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("loss", MEANS)
def test_nothing_is_said_of_a_mean(loss: Loss, sizes: Any) -> None:
    assert looked(loss, sizes) == []


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("loss", "words"), NO_MEANS)
def test_what_is_no_mean_is_told_by_name(loss: Loss, words: str, sizes: Any) -> None:
    texts = looked(loss, sizes)
    assert texts
    assert re.search(words, texts[0])


def test_losses_of_several_lines_are_told_from_each_other() -> None:
    """One loss of the larger batch, and another one, of fewer numbers, of the smaller one."""
    x, y = samples(6, 3, 4)
    looks = LossLooks()
    looks.begin(0, 4)
    looks.see(F.mse_loss(MODEL(x[:4]), y[:4]) / 2)
    assert looks.end(4, sums=False) is None
    looks.begin(0, 2)
    looks.see(F.mse_loss(MODEL(x[4:])[:, 0], y[4:, 0]) / 2)
    assert looks.end(2, sums=False) is None


def test_only_batches_of_one_size_tell_no_sum() -> None:
    """A factor may be that of the size which all batches have."""
    assert looked(half, (2, 2, 2)) == []


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        named("sum", half, ""),
        named("of each", lambda o, y: [each.square().sum() for each in o - y], ""),
        named("mean", F.mse_loss, r"a mean \(MseLoss, times 1\)"),
        named("and a mean", lambda o, y: half(o, y) + 0.1 * o.mean(), r"a mean \(mean\(\), times"),
        named("penalty", lambda o, y: half(o, y) + 0.1 * penalty(), "once for each worker"),
    ],
)
def test_a_sum_has_no_term_that_is_none(loss: Loss, words: str) -> None:
    texts = looked(loss, (2, 2, 1), sums=True)
    assert bool(texts) == bool(words)
    assert re.search(words, " ".join(texts))


# -- beside one process ----------------------------------------------------------------------------


def of(loss: Loss, weight: Callable[[torch.Tensor], float] | None = None) -> Script:
    """A script whose loss is the sum of several of its model's outputs, each with a backward pass."""

    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                if weight is not None:
                    steepest.weight(weight(y))
                parts.optimizer.zero_grad()
                found = loss(parts.model(x), y)
                for each in found if isinstance(found, list) else [found]:
                    each.backward(retain_graph=True)
                come()
                parts.optimizer.step()

    return Script(loop, net, sgd(0.02, momentum=0.9), data=samples(SAMPLES, 3, 4), epochs=2)


def told(script: Script, strategy: str = "ps", workers: int = WORKERS) -> tuple[float, list[str]]:
    """How far a script's weights are from those of one process, and what it is told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(script, workers, STRATEGIES[strategy])
    texts = [str(each.message) for each in caught if "worker" in str(each.message)]
    return difference(found.weights, script.alone(workers)), texts


#: Those of whose parameters a part is not the model's are no losses of a script.
RIGHT = [
    each
    for each in MEANS
    if "penalty" not in str(each.id)
    and each.id not in ("sum times a part", "scaled by a count of its own")
]


@pytest.mark.few(6)
@pytest.mark.parametrize("strategy", ["ps", pytest.param("allreduce", marks=pytest.mark.full)])
@pytest.mark.parametrize("loss", RIGHT)
def test_a_mean_is_that_of_one_process(loss: Loss, strategy: str) -> None:
    distance, texts = told(of(loss), strategy)
    assert distance < 1e-12
    assert not texts


WRONG = [each for each in NO_MEANS if "penalty" not in str(each.id)]


@pytest.mark.parametrize(("loss", "words"), [*WRONG, named("half a sum", half, SUM)])
def test_what_is_not_that_of_one_process_is_told(loss: Loss, words: str) -> None:
    distance, texts = told(of(loss))
    assert distance > 1e-6
    assert texts
    assert all(re.search(words, text) for text in texts)
    assert told(of(loss), workers=1) == (pytest.approx(0, abs=1e-12), [])


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (lambda o, y: F.cross_entropy(o, labels(y), CLASSES), lambda y: CLASSES[labels(y)].sum()),
        (lambda o, y: F.cross_entropy(of_each(o), tokens(y)), lambda y: (y > 0).sum()),
        (lambda o, y: (o * (y > 0)).sum() / (y > 0).sum(), lambda y: (y > 0).sum()),
    ],
)
def test_with_what_is_told_it_is_that_of_one_process(loss: Loss, weight: Any) -> None:
    distance, texts = told(of(loss, lambda y: float(weight(y))))
    assert distance < 1e-12
    assert not texts


def test_samples_that_are_compared_with_each_other_are_gathered() -> None:
    def loss(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs, targets = steepest.gather(o), steepest.gather(y)
        return F.cross_entropy(outputs @ targets.T, torch.arange(len(outputs)))

    distance, texts = told(of(loss))
    assert distance < 1e-12
    assert not texts


@pytest.mark.parametrize(("count", "words"), [(18, ""), (14, "only those of backward")])
def test_gradients_by_hand_that_are_added_up_are_told_where_shares_differ(
    count: int, words: str
) -> None:
    def loop(parts: Parts, epochs: int) -> None:
        parameters = list(parts.model.parameters())
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                found = torch.autograd.grad(F.mse_loss(parts.model(x), y), parameters)
                for parameter, own in zip(parameters, found, strict=True):
                    parameter.grad = own if parameter.grad is None else parameter.grad + own
            parts.optimizer.step()
            parts.optimizer.zero_grad()

    distance, texts = told(Script(loop, data=samples(count), epochs=2))
    assert (distance > 1e-6) == bool(words) == bool(texts)
    assert all(re.search(words, text) for text in texts)
