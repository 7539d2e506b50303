"""Losses by name, losses with a weight, and losses that a module's output has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steepest import TorchModel
from steepest.core.data.sampler import SamplePlan
from steepest.core.messages.driver import Failure, Result
from steepest.core.models.losses import weigh
from steepest.errors import ConfigurationError, ModelError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster, replay
from tests.own_rules import PairsStrategy
from tests.reference import Task, difference, perceptron, same_bits, samples, sgd, snapshot


def both(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"square": F.mse_loss(output, target), "absolute": 0.1 * F.l1_loss(output, target)}


def added(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    square, absolute = both(output, target).values()
    return square + absolute


@pytest.mark.parametrize("weighted", [False, True])
def test_several_losses_are_added_up_and_told_by_name(weighted: bool) -> None:
    data = samples(24)

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        return (both(output, target), len(target)) if weighted else both(output, target)

    task = Task(loss=loss, data=data, batch_size=3)
    cluster = InProcessCluster(task.creator(), num_workers=2)
    results = cluster.step(6)
    expected = Task(loss=added, data=data, batch_size=3).train(2, 6)
    assert difference(cluster.weights(), expected) < 1e-12
    for result in results:
        assert result.metrics.keys() == {"square", "absolute"}
        assert sum(result.metrics.values()) == pytest.approx(result.loss, rel=1e-12)


def test_a_batch_of_images_of_different_sizes_has_as_many_samples_as_targets() -> None:
    images = [torch.ones(3, 8, 6), torch.ones(3, 5, 9)]
    targets = [{"labels": torch.tensor([1])}, {"labels": torch.tensor([0, 2])}]
    for batch in ((images, targets), [tuple(images), tuple(targets)]):
        _, _, samples, weight = weigh(batch, torch.zeros((), requires_grad=True), None)
        assert (samples, weight) == (2, 2.0)


def test_losses_by_name_are_those_of_an_evaluation_too() -> None:
    x, y = samples(4)
    torch.manual_seed(0)
    model = TorchModel(perceptron(), loss=both, data=(x, y), batch_size=2, optimizer=sgd())
    found = model.evaluate((x, y))
    expected = both(model.module(x), y)
    assert found.metrics == {name: value.item() for name, value in expected.items()}
    assert found.loss == pytest.approx(sum(found.metrics.values()))


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Classifier(nn.Module):
    """A module as those of Hugging Face's transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.layer(inputs)
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


X, Y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 2


def right(output: Output, labels: torch.Tensor) -> torch.Tensor:
    return (output.logits.argmax(1) == labels).double().mean()


@pytest.mark.parametrize(
    "data", [(X, Y), [{"inputs": x, "labels": y} for x, y in zip(X, Y, strict=True)]]
)
def test_the_output_of_a_module_may_have_the_loss(data: Any) -> None:
    def creator(worker: int, device: int) -> TorchModel:
        return TorchModel(
            Classifier(), data=data, batch_size=3, optimizer=sgd(), metrics={"right": right}
        )

    cluster = InProcessCluster(creator, num_workers=2)
    results = cluster.step(4)

    def plain() -> nn.Module:
        return Classifier().layer

    expected = Task(plain, loss=F.cross_entropy, data=(X, Y), batch_size=3).train(2, 4)
    found = {name.removeprefix("layer."): w for name, w in cluster.weights().items()}
    assert difference(found, expected) < 1e-12
    assert all(0 <= result.metrics["right"] <= 1 for result in results)


@pytest.mark.parametrize(
    ("module", "data", "loss", "metrics", "message"),
    [
        (Classifier(), (X,), None, {}, "no loss: the module returned Output whose loss is None"),
        (nn.Linear(3, 2).double(), (X,), None, {}, "no loss: .* a tensor .* without a loss"),
        (nn.Linear(3, 2).double(), (X, Y), lambda o, y: {}, {}, "the loss is dict"),
        (nn.Linear(3, 2).double(), (X, Y), lambda o, y: {"a": o}, {}, "loss 'a' is a tensor"),
        (
            nn.Linear(3, 2).double(),
            (X, Y),
            lambda o, y: {"a": o.mean()},
            {"a": lambda o, y: 1.0},
            "a loss is named 'a'",
        ),
    ],
)
def test_what_is_no_loss_is_refused(
    module: nn.Module, data: Any, loss: Any, metrics: Any, message: str
) -> None:
    model = TorchModel(module, loss=loss, data=data, batch_size=2, optimizer=sgd(), metrics=metrics)
    with pytest.raises(ModelError, match=message):
        model.evaluate(next(model.data.open([torch.arange(2).numpy()])))


def test_a_last_batch_of_one_sample_is_told_to_be_left_out() -> None:
    """Two samples are left, which one process could take: each of two workers has one."""
    data = TensorDataset(*samples(10))

    def train(drop_last: bool) -> Any:
        def create(worker: int, device: int) -> TorchModel:
            return TorchModel(
                nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(),
                loss=nn.MSELoss(), optimizer=sgd(0.1), data=DataLoader(data, batch_size=2, drop_last=drop_last),
            )  # fmt: skip

        return InProcessCluster(create, num_workers=2).step(3)[-1]

    failure = train(drop_last=False)
    assert isinstance(failure, Failure)
    assert failure.kind == "ModelError"
    assert "drop_last=True" in failure.error
    assert isinstance(train(drop_last=True), Result)


# -- sums ------------------------------------------------------------------------------------------


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target, reduction="sum")


def summed_parts(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"square": summed(output, target), "other": 0.1 * (output - target).abs().sum()}


@pytest.mark.parametrize("config", [ParameterServerStrategy(), AllreduceStrategy()])
@pytest.mark.parametrize(
    "settings", [{}, {"devices_per_worker": 2}, {"accumulate": 2}, {"num_workers": 1}], ids=str
)
def test_sums_make_the_updates_of_one_process(config: Any, settings: dict[str, Any]) -> None:
    """13 samples: the last step of each epoch has fewer, and not all workers equally many."""
    options = {"num_workers": 2} | settings
    task = Task(loss=summed, batch_size=2, optimizer=sgd(0.01, momentum=0.9))

    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            task.module(),
            loss=nn.MSELoss(reduction="sum"),
            reduction="sum",
            data=task.data,
            batch_size=2,
            optimizer=task.optimizer,
        )

    cluster = InProcessCluster(create, strategy=config, **options)
    results = cluster.step(9)
    trace = task.trace(math.prod(options.values()), 9)
    assert difference(cluster.weights(), trace[-1]) < 1e-12
    assert results[0].loss == pytest.approx(_mean_of(task, trace[0], results[0].samples), rel=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("config", [ParameterServerStrategy(), AllreduceStrategy()])
def test_a_batch_with_nothing_to_learn_from_counts_as_zero(config: Any, workers: int) -> None:
    """On the worker that has it, as its samples do beside others in one batch. A first one is taken for a mistake."""
    x, y = samples(24)
    x[SamplePlan(24, 2 * workers, 0).share(0, 0, 1)] = 1.0
    lacking = []

    def wanted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = target[:, 0] > 0
        lacking.append(not mask.any())
        if lacking[-1]:
            return torch.zeros((), dtype=output.dtype)
        return (F.mse_loss(output, target, reduction="none").mean(1) * mask).mean()

    y[:, 0] = x[:, 0]
    task = Task(loss=wanted, data=(x, y), batch_size=2, optimizer=sgd(0.1))
    cluster = InProcessCluster(task.creator(), num_workers=workers, strategy=config)
    results = cluster.step(9)
    assert all(isinstance(result, Result) for result in results)
    assert True in lacking

    def alone(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return wanted(output, target) + 0.0 * output.sum()

    expected = replace(task, loss=alone).train(workers, 9)
    assert difference(cluster.weights(), expected) < 1e-12


def _mean_of(task: Task, weights: Any, count: int) -> float:
    """The mean loss of the first step's samples."""
    module = task.module()
    module.load_state_dict(weights)
    x, y = task.data
    index = torch.from_numpy(SamplePlan(len(x), count, 0).share(0, 0, 1))
    return float(summed(module(x[index]), y[index]).detach()) / count


def test_sums_of_workers_that_update_alone_are_of_their_own_batches() -> None:
    """Local SGD's own updates, and pushes of an asynchronous job, are those of one process each."""
    x, y = (column[:1].repeat(8, 1) for column in samples(1))  # all are the same
    plain = Task(loss=summed, data=(x, y), batch_size=2, optimizer=sgd(0.01)).train(1, 4)

    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            perceptron(), loss=summed, reduction="sum", data=(x, y), batch_size=2,
            optimizer=sgd(0.01),
        )  # fmt: skip

    local = InProcessCluster(create, num_workers=2, strategy=LocalStrategy(sync_every=2))
    local.step(2)
    assert difference(local.weights(), plain) < 1e-12
    alone = ParameterServerStrategy(mode="async", num_servers=1)
    pushes = InProcessCluster(create, num_workers=1, strategy=alone)
    pushes.step(4)
    assert difference(pushes.weights(), plain) < 1e-12


class Counting(nn.Module):
    """Its sum over samples has a gradient of 1 for each visit of each."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.few(6)
@pytest.mark.parametrize("settings", [{}, {"devices_per_worker": 2}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("strategy", [ParameterServerStrategy(backup_workers=1), PairsStrategy()])
def test_sums_of_gradients_that_come_first_are_those_of_what_is_committed(
    strategy: Any, workers: int, settings: dict[str, int]
) -> None:
    """13 samples: shares of the last step of an epoch are smaller, and are committed with those of the next one."""

    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            Counting(13), loss=lambda o, t: o.sum(), data=(torch.eye(13), torch.zeros(13)),
            batch_size=2, optimizer=sgd(1.0), reduction="sum",
        )  # fmt: skip

    cluster = InProcessCluster(
        create, num_workers=workers, strategy=strategy, shuffle=3, keep_log=True, **settings
    )
    results = cluster.step(9)
    log, visits = cluster.log(), torch.zeros(13)
    assert log.plan is not None
    for epoch, begin, end in log.samples():
        visits[log.plan.samples_at(epoch, begin, end)] += 1
    assert difference(cluster.weights(), {"weight": -visits}) < 1e-5
    assert sum(each.samples for each in results if isinstance(each, Result)) == int(visits.sum())
    assert same_bits(cluster.weights(), replay(log, create))


def test_an_evaluation_of_sums_is_a_mean() -> None:
    x, y = samples(5)
    model = TorchModel(
        perceptron(), loss=summed_parts, reduction="sum", data=(x, y), batch_size=2, optimizer=sgd()
    )
    expected = {
        name: float(value.detach()) / 5 for name, value in summed_parts(model.module(x), y).items()
    }
    found = model.evaluate((x, y))
    assert found.metrics == pytest.approx(expected)
    assert found.loss == pytest.approx(sum(expected.values()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": nn.MSELoss(reduction="sum")}, "loss has reduction='sum', where .*='mean'"),
        ({"loss": partial(F.mse_loss, reduction="sum")}, "loss has reduction='sum'"),
        ({"loss": nn.MSELoss(reduction="none")}, "loss has reduction='none'"),
        ({"loss": nn.MSELoss(), "reduction": "sum"}, "loss has reduction='mean', where .*='sum'"),
        ({"reduction": "add"}, "reduction='add': give 'mean' or 'sum'"),
        ({"reduction": "sum", "data": iter([])}, "data that choose their own batches"),
    ],
)
def test_sums_and_means_that_are_mixed_up_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    given = {"loss": summed, "data": (X, Y)} | settings
    with pytest.raises(ConfigurationError, match=message):
        TorchModel(nn.Linear(3, 2).double(), batch_size=2, optimizer=sgd(), **given)


SUMS: dict[str, tuple[Any, str | None]] = {
    "a function of torch's": (summed, "refused: MseLoss"),
    "and more": (lambda o, t: summed(o, t) - 0.5 * o.mean(), "refused: MseLoss"),
    "classes": (lambda o, t: F.cross_entropy(o, t.argmax(1), reduction="sum"), "refused: NllLoss"),
    "by hand": (lambda o, t: ((o - t) ** 2).sum(), "told: sum()"),
    "a half, and a penalty": (
        lambda o, t: 0.5 * summed(o, t) + 1e-3 * o.square().sum(),
        "told: MseLoss",
    ),
    "doubled by hand": (lambda o, t: ((o - t) ** 2).sum() * 2, "told: sum()"),
    "a mean, doubled": (lambda o, t: 2 * F.mse_loss(o, t), None),
    "times a part": (lambda o, t: summed(o, t) * (1 / len(t)), None),
    "divided": (lambda o, t: summed(o, t) / len(t), None),
    "with a weight": (lambda o, t: (summed(o, t), 1.0), None),
    "a mean of sums": (lambda o, t: ((o - t) ** 2).sum(1).mean(), None),
    "a mean and a penalty": (lambda o, t: F.mse_loss(o, t) + o.square().sum(), None),
    "labels that are smoothed": (
        lambda o, t: F.cross_entropy(o, t.argmax(1), label_smoothing=0.1),
        None,
    ),
    "a sum with smoothed labels": (
        lambda o, t: F.cross_entropy(o, t.argmax(1), label_smoothing=0.1, reduction="sum"),
        "told: NllLoss",
    ),
    "targets that are probabilities": (lambda o, t: F.cross_entropy(o, t.softmax(1)), None),
}


@pytest.mark.parametrize(("loss", "found"), SUMS.values(), ids=SUMS)
def test_a_sum_that_is_taken_for_a_mean_is_found_out(
    loss: Any, found: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task(loss=loss, data=samples(12), batch_size=3)
    (one,) = InProcessCluster(task.creator(), num_workers=1).step(1)
    assert isinstance(one, Result)
    assert not caplog.messages
    cluster = InProcessCluster(task.creator(), num_workers=2)
    outcome = cluster.step(2)[-1]
    assert isinstance(outcome, Failure) == (found is not None and "refused" in found)
    texts = [str(outcome)] if isinstance(outcome, Failure) else caplog.messages
    assert len(texts) == (0 if found is None else 1 if "refused" in found else 2)  # by worker
    for text in texts:
        assert f"adds up the samples of its batch ({str(found).partition(': ')[2]})" in text
        assert "reduction='sum'" in text


CLASS_WEIGHTS = torch.tensor([1.0, 4.0], dtype=torch.float64)


def ignoring(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Leave out the targets of a third of the samples, of which batches have some or none."""
    classes = target.argmax(1)
    classes[output[:, 0] > output[:, 0].mean()] = -100
    return classes


WEIGHED: dict[str, tuple[Any, bool]] = {
    "class weights": (lambda o, t: F.cross_entropy(o, t.argmax(1), CLASS_WEIGHTS), True),
    "ignored targets": (lambda o, t: F.cross_entropy(o, ignoring(o, t)), True),
    "weights amid a sum": (
        lambda o, t: 0.1 * F.cross_entropy(o, t.argmax(1), CLASS_WEIGHTS) + F.mse_loss(o, t),
        True,
    ),
    "said": (
        lambda o, t: (
            F.cross_entropy(o, t.argmax(1), CLASS_WEIGHTS),
            float(CLASS_WEIGHTS[t.argmax(1)].sum()),
        ),
        False,
    ),
    "classes": (lambda o, t: F.cross_entropy(o, t.argmax(1)), False),
    "positions of an image": (
        lambda o, t: F.cross_entropy(
            o[:, :, None, None].expand(-1, -1, 2, 3), t.argmax(1)[:, None, None].expand(-1, 2, 3)
        ),
        False,
    ),
}


@pytest.mark.parametrize(("loss", "is_told"), WEIGHED.values(), ids=WEIGHED)
def test_a_mean_by_weights_that_are_not_said_is_warned_of(
    loss: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once by each worker, and not where one process has the whole batch."""
    alone, cluster = (
        InProcessCluster(
            Task(loss=loss, data=samples(13), batch_size=12 // count).creator(), num_workers=count
        )
        for count in (1, 3)
    )
    alone.step(8)
    assert not caplog.messages
    cluster.step(8)
    assert len(caplog.messages) == 3 * is_told
    assert all("return (loss, weight)" in text for text in caplog.messages)
    if not is_told:
        assert difference(cluster.weights(), alone.weights()) < 1e-12


# -- weights ---------------------------------------------------------------------------------------


class Bags(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Bags of ids of several lengths, or sequences of several lengths."""

    def __init__(self, item: Callable[[int], torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 9, (13,), generator=generator).tolist()
        self.items = [item(length) for length in lengths]
        self.labels = torch.arange(13) % 2

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        return self.items[index], self.labels[index]


def bags_of(items: list[Any]) -> Any:
    bags, labels = zip(*items, strict=True)
    offsets = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
    return torch.cat(bags), offsets, torch.stack(labels)


def in_time(items: list[Any]) -> Any:
    sequences, labels = zip(*items, strict=True)
    return nn.utils.rnn.pad_sequence(list(sequences)), torch.stack(labels)


class BagNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(5, 3).double(), nn.Linear(3, 2).double()

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(ids, offsets))


class TimeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNN(3, 3).double(), nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[1][0])


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "bags": (BagNet, bags_of, lambda length: torch.arange(length) % 5),
    "time first": (TimeNet, in_time, lambda length: torch.ones(length, 3, dtype=torch.float64)),
}


@pytest.mark.parametrize(("net", "collate", "item"), FORMS.values(), ids=FORMS)
def test_batches_weigh_as_many_samples_as_the_job_has_dealt_to_them(
    net: Any, collate: Any, item: Any
) -> None:
    """However their tensors are laid out; 13 samples, of which the last step has five."""
    data = Bags(item)

    def create(worker: int, device: int) -> TorchModel:
        loader = DataLoader(data, batch_size=4, collate_fn=collate)
        return TorchModel(net(), loss=F.cross_entropy, data=loader, optimizer=sgd(0.5))

    cluster = InProcessCluster(create, num_workers=2)
    results = cluster.step(4)
    assert [result.samples for result in results] == [8, 5, 8, 5]
    torch.manual_seed(0)
    module, plan = net(), SamplePlan(13, 8, 0)
    optimizer = sgd(0.5)(module)
    for step in range(4):
        shares = [plan.share(step, part, 2).tolist() for part in (0, 1)]
        optimizer.zero_grad()
        for share in shares:  # each worker lays out its own part
            *inputs, target = collate([data[i] for i in share])
            loss = F.cross_entropy(module(*inputs), target)
            (loss * len(share) / sum(map(len, shares))).backward()
        optimizer.step()
    assert difference(cluster.weights(), snapshot(module)) < 1e-12


BAGS = (torch.arange(9) % 5, torch.tensor([0, 4]), torch.tensor([0, 1]))


def test_a_stream_of_which_nothing_says_how_many_samples_a_batch_has_is_refused() -> None:
    def create(weighted: bool) -> TorchModel:
        def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
            mean = F.cross_entropy(output, target)
            return (mean, 2.0) if weighted else mean

        return TorchModel(BagNet(), loss=loss, data=iter([BAGS] * 9), batch_size=2, optimizer=sgd())

    refused = InProcessCluster(lambda *_: create(False), num_workers=2).step(1)[-1]
    assert isinstance(refused, Failure)
    assert "arrays of lengths 9, 2, and its data choose their own batches" in str(refused)
    (taken,) = InProcessCluster(lambda *_: create(True), num_workers=2).step(1)
    assert taken.samples == 4
