"""Training with plain processes: the results of one process, deaths, errors, and nothing left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from steepest.core import ProcessRuntime, Settings, Trainer
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.generators import seed_everything
from steepest.core.messages.driver import Result
from steepest.core.strategies.allreduce import AllreduceStrategy
from steepest.core.strategies.strategy import Strategy
from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    ModelRaisedError,
    PeerLostError,
    ShutdownError,
)
from tests.core import models

EPOCHS, SEED = 2, 3
STEPS = 6  # in an epoch, with two workers


def trainer(creator: Any = models.classifier, **options: Any) -> Trainer:
    """Return a trainer whose processes start fast."""
    return Trainer(creator, seed=SEED, runtime=ProcessRuntime(), **options)


def trained_alone(workers: int, epochs: int = EPOCHS) -> dict[str, torch.Tensor]:
    """Return the weights of plain PyTorch training in one process, on the batches of so many workers."""
    seed_everything(SEED)
    net, (x, y) = models.network(), models.data()
    optimizer = models.optimizer(net)
    plan = SamplePlan(models.SAMPLES, workers * models.BATCH, SEED)
    for step in range(epochs * plan.steps_per_epoch):
        chosen = torch.from_numpy(plan.share(step, 0, 1))
        optimizer.zero_grad()
        F.cross_entropy(net(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return net.state_dict()


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_synchronous_strategies_train_as_one_process_does(workers: int) -> None:
    found = {}
    for strategy in ("ps", "allreduce"):
        with trainer(num_workers=workers, strategy=strategy) as job:
            results = job.fit(epochs=EPOCHS)
            found[strategy] = job.state_dict()
            assert [result.step for result in results] == list(range(1, job.step + 1))
            assert sum(result.samples for result in results) == EPOCHS * models.SAMPLES

    expected = trained_alone(workers)
    assert_close(found["ps"], expected)
    for name, value in found["ps"].items():
        assert torch.equal(value, found["allreduce"][name])


@pytest.mark.parametrize("strategy", ["async", "ssp"])
def test_asynchronous_strategies_learn(strategy: str) -> None:
    with trainer(num_workers=2, strategy=strategy) as job:
        results = job.fit(epochs=12)

    losses = [result.loss or 0.0 for result in results]
    assert sum(losses[-6:]) < 0.3 * sum(losses[:6])  # of an epoch each
    assert sum(result.samples for result in results) == 12 * models.SAMPLES


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_the_successor_of_a_killed_worker_leads_to_the_same_weights(
    strategy: str, tmp_path: Path
) -> None:
    creator = partial(models.struck, models.classifier, tmp_path, 1, [3, 2])
    with trainer(
        creator, num_workers=2, strategy=strategy, settings=Settings(snapshot_every=2)
    ) as job:
        before = job.pids
        seen: list[dict[str, torch.Tensor]] = []
        results = job.fit(epochs=EPOCHS, on_step=lambda result: seen.append(job.state_dict()))
        found, after = job.state_dict(), job.pids

    assert len(list(tmp_path.iterdir())) == 2
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert [result.step for result in results] == list(range(1, job.step + 1))
    assert_close(found, trained_alone(2))


@pytest.mark.parametrize(
    ("strategy", "on_death", "visit"),
    [
        ("async", "replace", {1}),
        ("ps", "replace", {1 / 3}),
        ("async", "continue", {1}),
        ("ps", "continue", {1 / 3, 1 / 2}),
        ("allreduce", "continue", {1 / 3, 1 / 2}),
    ],
)
def test_each_sample_is_part_of_the_weights_once_when_a_worker_is_killed(
    strategy: str, on_death: str, visit: set[float], tmp_path: Path
) -> None:
    creator = partial(models.struck, models.counter, tmp_path, 2, [3])
    settings = Settings(on_death=on_death, snapshot_every=2)
    with trainer(creator, num_workers=3, strategy=strategy, settings=settings) as job:
        epochs = 0
        while not list(tmp_path.iterdir()):  # under "async" others may take its shares
            job.fit(epochs=1)
            epochs += 1
        found = -job.state_dict()["weight"].flatten()
        assert job.num_workers == len(job.pids) == (2 if on_death == "continue" else 3)

    assert epochs == 1 or strategy == "async"
    allowed = epochs * torch.tensor(sorted(visit), dtype=torch.float64)
    assert torch.isclose(found[:, None], allowed, rtol=0, atol=1e-12).any(1).all(), found
    if on_death == "continue" and strategy != "async":
        assert len(found.unique()) == 2  # steps of three workers, and of two


def test_the_only_worker_is_replaced_with_the_buffers_of_the_last_copy(tmp_path: Path) -> None:
    settings = Settings(snapshot_every=2)
    with trainer(
        partial(models.struck, models.normalized, tmp_path, 0, [4]), settings=settings
    ) as job:
        job.fit(steps=5)
        found = job.state_dict()
    with trainer(models.normalized) as job:
        job.fit(steps=5)
        assert_close(found, job.state_dict())
    assert list(tmp_path.iterdir())


def test_a_death_is_raised_where_that_is_asked_for(tmp_path: Path) -> None:
    creator = partial(models.struck, models.classifier, tmp_path, 1, [2])
    with trainer(creator, num_workers=2, settings=Settings(on_death="raise")) as job:
        cause = rf"worker 1 \(pid {job.pids[1]}\) died: killed by SIGKILL"
        with pytest.raises(PeerLostError, match=cause):
            job.fit(steps=5)
        with pytest.raises(ShutdownError):
            job.fit(steps=1)


def test_workers_that_die_again_and_again_are_not_replaced_for_ever() -> None:
    with pytest.raises(PeerLostError, match="worker 1.*exited with code 3"):
        trainer(models.deadly, num_workers=2)


def test_an_exception_of_the_users_is_told_with_its_place_and_nothing_is_applied() -> None:
    with trainer(models.poisoned, num_workers=2) as job:
        with pytest.raises(ModelRaisedError, match=r"worker [01].*no loss for sample 7") as told:
            job.fit(epochs=1)
        assert "in loss" in str(told.value.__cause__)
        step, weights = job.step, job.state_dict()
        with pytest.raises(ModelRaisedError, match=f"in step {step + 1}"):
            job.fit(steps=1)
        assert_close(job.state_dict(), weights)


def test_a_creator_that_raises_is_told_and_nothing_is_left() -> None:
    runtime = ProcessRuntime()
    with pytest.raises(ModelRaisedError, match="worker 1: LookupError: there is no model"):
        Trainer(models.unmade, num_workers=2, runtime=runtime)
    assert_nothing_is_left(runtime)


def assert_nothing_is_left(runtime: ProcessRuntime) -> None:
    assert runtime._children
    for child in runtime._children:
        assert child.ended.done()
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_an_exception_between_two_steps_leaves_a_trainer_that_goes_on() -> None:
    def stop(result: Result) -> None:
        raise InterruptedError("enough")

    with trainer(num_workers=2) as job:
        with pytest.raises(InterruptedError):
            job.fit(epochs=1000, on_step=stop)
        begun, epoch = job.step, job.step // STEPS
        rest = job.fit(epochs=1)
        assert [result.step for result in rest] == list(range(begun + 1, (epoch + 1) * STEPS + 1))
        assert_close(job.state_dict(), trained_alone(2, epoch + 1))


def test_a_worker_that_hangs_is_named_with_its_step() -> None:
    settings = Settings(step_timeout=1.0)
    with trainer(num_workers=2, settings=settings) as job:

        def hang(result: Result) -> None:
            os.kill(job.pids[1], signal.SIGSTOP)

        with pytest.raises(DeadlineError, match=r"step \d+ was not committed within 1 s.*worker 1"):
            job.fit(steps=1000, on_step=hang)


def test_a_worker_that_hangs_while_it_starts_is_named() -> None:
    with trainer(num_workers=2) as job:
        job._crew._seconds = 1.0
        os.kill(job.pids[1], signal.SIGSTOP)
        with pytest.raises(
            DeadlineError, match="worker 1 did not do this within 1 s, after step 0"
        ):
            job._crew.ask("do this", "join", {0: (), 1: ()})


def test_nothing_is_left_when_a_trainer_is_closed() -> None:
    runtime = ProcessRuntime()
    with Trainer(models.classifier, num_workers=2, runtime=runtime) as job:
        job.fit(steps=1)
    assert_nothing_is_left(runtime)


def _no_signature() -> None: ...


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: trainer(_no_signature), "model_creator"),
        (lambda: trainer(num_workers=0), "num_workers=0"),
        (lambda: trainer(strategy="local"), "strategy='local': give one of 'ps', 'async'"),
        (lambda: trainer(strategy=Strategy()), "strategy=Strategy"),
        (lambda: Settings(on_death="ignore"), "on_death='ignore'"),
        (lambda: Settings(step_timeout=0), "step_timeout"),
        (lambda: trainer(lambda worker, device: None), "cannot be pickled"),
        (lambda: trainer(models.streaming), "the training data are a stream"),
        (lambda: trainer(strategy=AllreduceStrategy(transport="unix")), 'transport="unix"'),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_epochs_and_steps_exclude_each_other() -> None:
    with trainer() as job:
        for arguments in ({}, {"epochs": 1, "steps": 1}, {"steps": 0}, {"epochs": -1}):
            with pytest.raises(ConfigurationError):
                job.fit(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="torch sees no 'cuda' here"):
        trainer(settings=Settings(device="cuda"))
    with pytest.raises(ConfigurationError, match="device"):
        Settings(device="tpu")
