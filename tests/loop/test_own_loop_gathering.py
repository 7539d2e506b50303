"""What loops of users' own gather from all workers: each has the same, as of one process on all of the data."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import steepest
from steepest import AllreduceStrategy, FailureConfig, ParameterServerStrategy
from steepest.errors import ConfigurationError, ModelRaisedError
from steepest.loop.gathering import joined, packed
from steepest.loop.loaders import EvaluationLoader
from steepest.loop.session import Session
from tests.own_loop_runs import run
from tests.own_loops import ALONE, BATCH, Whole
from tests.random_examples import some_of
from tests.reference import Weights, difference, perceptron, samples, snapshot
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config

#: What each worker has gathered, by its number.
GATHERED: dict[int, list[Any]] = {}
FOUND: dict[str, Weights] = {}
TRAINING, EVALUATION = samples(13), samples(11)


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def _loader() -> Any:
    if workers := ALONE.get("workers"):
        return Whole(TRAINING, workers * BATCH, 0)
    return DataLoader(TensorDataset(*TRAINING), batch_size=BATCH, shuffle=True)


def _slow() -> None:
    if not ALONE:
        pause(random.choice((1e-3, 1e-2)))


def evaluating() -> None:
    """After each epoch all workers evaluate, decide by the whole loss, and go on."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    falling = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
    by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    evaluation = DataLoader(TensorDataset(*EVALUATION), batch_size=BATCH)
    model, optimizer, falling, by_step, loader, evaluation = steepest.prepare(
        model, optimizer, falling, by_step, _loader(), evaluation
    )
    kept = steepest.register(losses=[])
    for _ in steepest.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            _slow()
            optimizer.step()
            by_step.step()
        kept.losses = [*kept.losses, loss.item() > 0]
        rows, total, count = [], torch.zeros(()), 0
        for x, y in evaluation:
            with torch.no_grad():
                errors = nn.functional.mse_loss(model(x), y, reduction="none").sum(dim=1)
            rows.append(errors)
            total, count = total + errors.sum(), count + len(x)
        _slow()
        found = steepest.gather({"rows": torch.cat(rows), "sums": (total, count)})
        GATHERED.setdefault(steepest.rank(), []).append(found)
        assert found["sums"][1].sum() == len(EVALUATION[0])
        mean = (found["sums"][0].sum() / found["sums"][1].sum()).item()
        falling.step(mean)
        steepest.report(loss=loss, mean=mean, epochs=len(kept.losses))
    FOUND["evaluating"] = snapshot(model)


def among_batches() -> None:
    """Workers gather before a step, and after each second one."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, by_step, loader = steepest.prepare(model, optimizer, by_step, _loader())
    kept = steepest.register(count=0, mean=0.0)
    for _ in steepest.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            _slow()
            mean = steepest.gather(y).mean()
            (nn.functional.mse_loss(model(x), y) + mean * model(x).mean()).backward()
            optimizer.step()
            by_step.step()
            kept.count += 1
            if kept.count % 2 == 0:
                _slow()
                weights = torch.cat([each.detach().flatten() for each in model.parameters()])
                kept.mean = (kept.mean + steepest.gather(weights).mean()).item()
                for group in optimizer.param_groups:
                    group["momentum"] = 0.5 + 0.1 * float(np.tanh(kept.mean))
    FOUND["among_batches"] = snapshot(model)


def in_rounds() -> None:
    """Without a loader, each worker gathers before, between and after the steps of a round."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer = steepest.prepare(model, optimizer)
    for number in steepest.epochs(4):
        ranks = range(ALONE["workers"]) if ALONE else [steepest.rank()]
        rows = [torch.full((2, 3), 1.0 + number + r, dtype=torch.float64) for r in ranks]
        x = torch.cat(rows)
        mean = steepest.gather(x).mean()
        for again in range(2):
            _slow()
            optimizer.zero_grad()
            (model(x / mean).square().mean() + again * model(x).mean()).backward()
            optimizer.step()
            mean = mean + steepest.gather(x).sum() / 100
    FOUND["in_rounds"] = snapshot(model)


def alone(script: Any, workers: int) -> Weights:
    ALONE["workers"] = workers
    torch.manual_seed(0)
    GATHERED.clear()
    try:
        script()
    finally:
        ALONE.clear()
    return FOUND[script.__name__]


SCRIPTS = [evaluating, among_batches, in_rounds]


@pytest.mark.few(1)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_gathered_is_that_of_one_process(script: Any, workers: int) -> None:
    expected = alone(script, workers)
    single = [dict(each) for each in GATHERED.get(0, [])]
    GATHERED.clear()
    with Simulation(seed=1).running():
        found = steepest.run(script, num_workers=workers, progress=False, run_config=run_config())
        weights = dict(found.state_dict)
    assert difference(weights, expected) < 1e-12
    for each in GATHERED.values():
        for one, other in zip(single, each, strict=True):
            assert torch.allclose(one["rows"], other["rows"], rtol=0, atol=1e-12)
            assert other["sums"][1].tolist() == {1: [11], 2: [6, 5], 3: [4, 4, 3]}[workers]


STRATEGIES: dict[str, Any] = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "allreduce, two copies": AllreduceStrategy(replication=2, chunk_bytes=64),
}


def struck(script: Any, strategy: str, seed: int) -> None:
    """Check what a script finds while a process dies at a moment drawn from a seed."""
    draw, simulation = random.Random(seed), Simulation(seed)

    def strike() -> None:
        if living := simulation.living():
            simulation.world.kill(draw.choice(living), "it was killed. connection error code 2.")

    class Deaths(steepest.Callback):
        def on_fit_begin(self, sgd: Any, steps: int) -> None:
            simulation.at_event(draw.randrange(1, 500), strike)

        def on_fit_end(self, sgd: Any) -> None:
            simulation.forget_faults()

    with simulation.running():
        found = steepest.run(
            script,
            num_workers=3,
            strategy=STRATEGIES[strategy],
            run_config=run_config(failure=FailureConfig(snapshot_every=3, patience=math.inf)),
            callbacks=[Deaths()],
            progress=False,
        )
        events = {event["event"] for event in found.history.events}
        weights, reports = dict(found.state_dict), found.reports
    if not {"left", "returned", "resized", "recovered"} & events:
        assert difference(weights, alone(script, 3)) < 1e-12
        assert [row["epochs"] for row in reports if "epochs" in row] == [
            1.0 + at for at in range(len(reports))
        ]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_process_dies_while_others_gather(
    script: Any, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who joins last is asked before for what it has gathered, which is no message out of place."""
    with caplog.at_level(logging.WARNING, "steepest.core.transport.router"):
        for seed in range(3):
            struck(script, strategy, seed)
    assert "refused" not in caplog.text


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_processes_die_at_many_moments_while_others_gather(script: Any, strategy: str) -> None:
    for seed in some_of(range(3, 9), 2):
        struck(script, strategy, seed)


def dealt(count: int, workers: int, batch: int, **settings: Any) -> list[list[list[int]]]:
    """Return the samples of each batch of each worker of a loader for evaluations."""
    loader = DataLoader(TensorDataset(torch.arange(count)), batch_size=batch, **settings)
    found = []
    for rank in range(workers):
        session = Session(lambda: None, rank, workers)
        evaluation = EvaluationLoader(loader, session.loop)
        found.append([x.tolist() for (x,) in evaluation])
        assert len(found[-1]) == len(evaluation)
    return found


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_each_sample_of_an_evaluation_is_dealt_to_one_worker(workers: int, batch: int) -> None:
    for count in range(workers, 25):
        found = dealt(count, workers, batch)
        assert len({len(each) for each in found}) == 1
        assert all(len(part) > 0 for each in found for part in each)
        in_order = [x for parts in zip(*found, strict=True) for part in parts for x in part]
        assert in_order == list(range(count))
        whole = dealt(count, workers, batch, drop_last=True)
        kept = sorted(x for each in whole for part in each for x in part)
        assert kept == list(range(count - count % (workers * batch)))


def test_a_part_of_a_data_set_is_evaluated_by_its_samples() -> None:
    ((one,), (other,)) = dealt(9, 2, 2, sampler=SubsetRandomSampler([1, 4, 7, 8]))
    assert len(one) == len(other) == 2
    assert {*one, *other} == {1, 4, 7, 8}


def test_a_further_loader_that_shuffles_has_another_order_in_each_pass() -> None:
    """As a second one to train on does; and what is gathered of a pass comes in the order of the data set."""
    orders: list[Any] = []

    def script() -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
        further = DataLoader(TensorDataset(torch.arange(16)), batch_size=2, shuffle=True)
        model, optimizer, loader, further = steepest.prepare(model, optimizer, loader, further)
        for _ in steepest.epochs(2):
            seen = []
            for (x,), (z,) in zip(loader, further, strict=False):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                seen.append(z)
            orders.append((steepest.rank(), torch.cat(seen).tolist()))
            for _ in range(2):
                whole = torch.cat([z for (z,) in further])
                orders.append((steepest.rank(), whole.tolist()))
                assert steepest.gather(whole).tolist() == list(range(16))

    run(script, 2)
    first, second = ([seen for rank, seen in orders if rank == each] for each in range(2))
    passes = [a + b for a, b in zip(first, second, strict=True)]
    assert len(passes) == 6
    for each in passes:
        assert len({*each}) == len(each)
        assert each != sorted(each)
    assert len({tuple(each) for each in passes}) == 6


def test_values_of_any_form_are_joined() -> None:
    parts = [
        {"a": (torch.ones(n, 2), [n] * n), "b": n, "c": np.full(n, n), "d": "x" * n}
        for n in (2, 0, 1)
    ]
    found = joined(parts[0], [packed(part) for part in parts], [])
    assert found["a"][0].tolist() == [[1.0, 1.0]] * 3
    assert found["a"][1] == [2, 2, 1]
    assert found["b"].tolist() == [2, 0, 1]
    assert found["c"].tolist() == [2, 2, 1]
    assert isinstance(found["c"], np.ndarray)
    assert found["d"] == ["xx", "", "x"]
    assert steepest.gather(parts[0])["b"].tolist() == [2]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_dicts_are_joined_by_their_keys(workers: int) -> None:
    """Each worker meets its classes in another order: all have the same, in the order of the first one."""
    names = ["cat", "dog", ("cow", 3)]
    values = [
        {name: {"hits": at * 10 + rank, "rows": [f"{rank}{name}"]} for at, name in enumerate(names)}
        for rank in range(workers)
    ]
    values = [dict([*each.items()][r:] + [*each.items()][:r]) for r, each in enumerate(values)]
    parts = [packed(value) for value in values]
    for rank, value in enumerate(values):
        found = joined(value, parts, [], rank)
        assert list(found) == names
        for at, name in enumerate(names):
            assert found[name]["hits"].tolist() == [at * 10 + r for r in range(workers)]
            assert found[name]["rows"] == [f"{r}{name}" for r in range(workers)]


OTHERS: dict[str, tuple[Any, Any]] = {
    r"at value\['cat'\] worker 0 has a tensor or a number, worker 1 nothing": (
        {"cat": 1},
        {"dog": 1},
    ),
    r"at value\['dog'\] worker 0 has nothing, worker 1 a tensor": (
        {"cat": 1},
        {"cat": 1, "dog": 1},
    ),
    r"at value\[1\]": ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
    "at value worker 0 has a tensor or a number, worker 1 a list": (1, [1]),
}


@pytest.mark.parametrize("words", OTHERS)
def test_values_of_other_structures_are_refused_by_all_in_the_same_words(words: str) -> None:
    values = OTHERS[words]
    parts = [packed(values[0]), packed(values[0], counts=False), packed(values[1])]
    told = set()
    for rank, value in enumerate((values[0], values[0], values[1])):
        with pytest.raises(
            ConfigurationError, match=words.replace("worker 1", "worker 2")
        ) as raised:
            joined(value, parts, [], rank)
        told.add(str(raised.value))
    assert len(told) == 1


def refused(prepared: Any) -> Any:
    def script() -> None:
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared(model, optimizer)

    return script


def gathers_before(model: Any, optimizer: Any) -> None:
    steepest.prepare(model, optimizer, _loader())
    steepest.gather(1)


def evaluates_few(model: Any, optimizer: Any) -> None:
    few = DataLoader(TensorDataset(torch.zeros(1)), batch_size=2)
    *_, few = steepest.prepare(model, optimizer, _loader(), few)
    list(few)


def samples_by_weight(model: Any, optimizer: Any) -> None:
    data = TensorDataset(torch.zeros(4))
    own = DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 4, 4))
    steepest.prepare(model, optimizer, _loader(), own)


def gathers_other_shapes(model: Any, optimizer: Any) -> None:
    *_, loader = steepest.prepare(model, optimizer, _loader())
    for _ in steepest.epochs(1):
        for _ in loader:
            steepest.gather(torch.zeros(2, 2 + steepest.rank()))


def gathers_an_object(model: Any, optimizer: Any) -> None:
    *_, loader = steepest.prepare(model, optimizer, _loader())
    for _ in steepest.epochs(1):
        for _ in loader:
            steepest.gather(object())


WRONG = {
    r"gather\(\) before steepest.epochs\(\)": gathers_before,
    "a loader of 1 samples for evaluations by 2 workers": evaluates_few,
    "a further loader with a sampler of its own": samples_by_weight,
    "as differ in their first dimension alone": gathers_other_shapes,
    r"gather\(\) was given a object": gathers_an_object,
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_gathered_is_told_in_words(words: str) -> None:
    with (
        Simulation(seed=1).running(),
        pytest.raises((ModelRaisedError, ConfigurationError), match=words),
    ):
        steepest.run(refused(WRONG[words]), num_workers=2, progress=False, run_config=run_config())


def test_workers_that_do_not_wait_for_each_other_do_not_gather() -> None:
    with (
        Simulation(seed=1).running(),
        pytest.raises(ModelRaisedError, match="where workers do not wait for each other"),
    ):
        steepest.run(
            in_rounds_of_a_loader,
            num_workers=2,
            strategy="async",
            progress=False,
            run_config=run_config(),
        )


def in_rounds_of_a_loader() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gathers_an_object(model, optimizer)
