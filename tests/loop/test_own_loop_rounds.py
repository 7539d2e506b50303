"""Loops of users' own in rounds of a quorum, and with paces: as `fit` with the same settings, and as plain torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import DistributedSGD, FailureConfig, LocalStrategy
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.commit_log import CommitLog
from steepest.core.models.torch import TorchModel
from steepest.errors import ModelRaisedError
from steepest.testing import replay
from tests.own_loop_runs import Found, InterruptedRunError, Interrupts, run
from tests.own_loops import BATCH, Parts, Script
from tests.random_examples import some_of
from tests.reference import Task, difference, same_bits, samples
from tests.rounds import OPTIMIZERS, by_hand, check_samples, deep
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config

SEEN: dict[tuple[int, int], list[Any]] = {}
SECONDS: list[float] = []  # of a batch, by worker; none where batches take no time


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    SEEN.clear()
    SECONDS.clear()
    with quiet():
        yield


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def watching(parts: Parts, epochs: int) -> None:
    """A mean and a count after each step; what there is after each epoch, by worker."""
    mean = nn.ParameterList(p.detach().clone() for p in parts.model.parameters())
    kept = steepest.register(mean=mean, count=0, samples=0)
    for epoch in steepest.epochs(epochs):
        for x, y in parts.loader:
            if SECONDS:
                pause(SECONDS[steepest.rank()])
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
            for scheduler in parts.schedulers:
                scheduler.step()
            kept.count += 1
            kept.samples += len(x)
            with torch.no_grad():
                for own, parameter in zip(mean, parts.model.parameters(), strict=True):
                    own.lerp_(torch.full_like(parameter, kept.count), 0.3)
        steepest.report(samples=kept.samples)
        counts = [each.last_epoch for each in parts.schedulers]
        found = [kept.count, kept.samples, counts, *(p.detach().clone() for p in mean)]
        SEEN[steepest.rank(), epoch] = found


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1.0)


ADAM = Script(watching, deep, data=samples(29, outputs=3))
ADAM = replace(ADAM, optimizer=OPTIMIZERS["adam"])
FALLING = replace(ADAM, schedule=falling)


def seen() -> dict[tuple[int, int], list[Any]]:
    found = dict(SEEN)
    SEEN.clear()
    return found


def all_in_each(workers: int, **settings: Any) -> LocalStrategy:
    """Rounds that do not depend on time."""
    return LocalStrategy(quorum=workers, grace=50.0, num_servers=2, chunk_bytes=64, **settings)


def model_of(script: Script) -> Any:
    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            script.model(),
            loss=nn.functional.mse_loss,
            data=script.data,
            batch_size=BATCH,
            optimizer=script.optimizer,
            lr_scheduler=script.schedule,
        )

    return create


def fitted(script: Script, workers: int, strategy: LocalStrategy) -> Found:
    """The same model, data and optimizer under `fit`."""
    with (
        Simulation(seed=1).running(),
        DistributedSGD(
            model_of(script), workers, strategy=strategy, run_config=run_config()
        ) as trainer,
    ):
        trainer.fit(epochs=script.epochs, progress=False)
        return Found(dict(trainer.state_dict()), [], list(trainer.history.steps), [])


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [3, 2, 1])
@pytest.mark.parametrize(
    "settings",
    [(3, 1, 0, 0.0), (4, 2, 0, 0.0), (8, 4, 0, 0.25), (4, 1, 2, 0.0), (6, 2, 2, 0.25)],
)
def test_a_loop_has_the_bits_of_fit(settings: tuple[int, int, int, float], workers: int) -> None:
    every, fragments, delay, blend = settings
    strategy = all_in_each(workers, sync_every=every, fragments=fragments, delay=delay, blend=blend)
    found, expected = (each(FALLING, workers, strategy) for each in (run, fitted))
    assert same_bits(found.weights, expected.weights)
    for name in ("loss", "samples", "epoch"):
        assert [row[name] for row in found.steps] == [row[name] for row in expected.steps]
    assert sum(SEEN[worker, 2][1] for worker in range(workers)) == 3 * 29


def logged_run(
    script: Script, workers: int, strategy: Any, kill: str = "", seed: int = 1
) -> tuple[Found, CommitLog]:
    """A run, in which a process may die, and its log."""
    simulation, logs, struck = Simulation(seed), [], []

    class Watches(steepest.Callback):
        """Kills a process at some moment, and takes the log at the end."""

        def on_fit_begin(self, sgd: Any, steps: int) -> None:
            if kill and not struck:
                simulation.at_event(random.Random(seed).randrange(20, 200), strike)

        def on_fit_end(self, sgd: Any) -> None:
            simulation.forget_faults()
            logs.append(sgd.log())

    def strike() -> None:
        struck.extend(each for each in simulation.living() if kill in str(each))
        simulation.world.kill(struck[0], "it was killed. connection error code 2.")

    with simulation.running():
        found = steepest.run(
            script,
            num_workers=workers,
            strategy=strategy,
            run_config=run_config(
                keep_log=True, failure=FailureConfig(patience=math.inf, snapshot_every=2)
            ),
            callbacks=[Watches()],
            progress=False,
        )
        assert bool(struck) == bool(kill)
        return Found(dict(found.state_dict), found.reports, list(found.history.steps), []), logs[-1]


ROUNDS = {
    "quorum": LocalStrategy(sync_every=2, quorum=1, num_servers=1),
    "two of three": LocalStrategy(sync_every=2, quorum=2, grace=0.05, num_servers=2),
    "pace": LocalStrategy(sync_every=4, pace="speed", num_servers=1),
    "fragments": LocalStrategy(sync_every=8, fragments=4, quorum=1, pace="speed", num_servers=1),
    "delay": LocalStrategy(sync_every=3, delay=2, quorum=1, num_servers=1),
    "delay, fragments": LocalStrategy(
        sync_every=4, fragments=2, delay=1, quorum=2, grace=0.05, num_servers=2
    ),
    "delay, pace": LocalStrategy(
        sync_every=8, fragments=2, delay=3, quorum=1, pace="speed", num_servers=1
    ),
}


def updates_up_to(log: CommitLog, worker: int, strategy: LocalStrategy, count: int) -> int:
    """How many updates of the job there are up to the furthest share in which a worker has samples, of so many."""
    parts = log.num_workers * strategy.updates
    of_share = strategy.updates_of_share
    plan = SamplePlan(count, parts * BATCH, 0)
    shares = {s for c in log.commits for p in c.pushes if p.worker == worker for s in p.shares}
    found = 0
    for step, place in (divmod(share, parts // of_share) for share in shares):
        if len(plan.share(step, place * of_share, parts)):
            ahead = strategy.updates if of_share > 1 else (place + 1) // log.num_workers
            found = max(found, step * strategy.updates + ahead)
    return found


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("kill", ["", "worker 0", "worker 2"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_workers_of_unequal_speed_and_deaths(name: str, kill: str, seed: int) -> None:
    """Each sample counts once in an epoch, loops see their samples, and the result is that of plain torch."""
    SECONDS.extend([0.2, 0.03, 0.05])
    script = replace(ADAM, data=samples(61, outputs=3), schedule=constant)
    found, log = logged_run(script, 3, ROUNDS[name], kill, seed)
    check_samples(log)
    assert sum(row["samples"] for row in found.steps) == 3 * 61
    assert len(found.reports) == 3
    assert {epoch for _, epoch in SEEN} == {0, 1, 2}
    if not kill:
        assert sum(SEEN[worker, 2][1] for worker in range(3)) == 3 * 61
        for worker in range(3):
            assert SEEN[worker, 2][2] == [updates_up_to(log, worker, ROUNDS[name], 61)]
    task = Task(deep, OPTIMIZERS["adam"], script.data, batch_size=BATCH)
    assert same_bits(replay(log, model_of(script)), found.weights)
    assert difference(found.weights, by_hand(task, log, ROUNDS[name])) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("quorum", [True, False])
def test_a_round_that_is_given_up_is_undone_in_the_loop(
    quorum: bool, fragments: int, delay: int
) -> None:
    """Whether it waits for others or not, and though it has begun the next one."""
    strategy = all_in_each(2, sync_every=4, fragments=fragments, delay=delay)
    strategy = replace(strategy, replication=2)
    if not quorum:
        strategy = replace(strategy, quorum=None, grace=None)
    undisturbed, expected = run(FALLING, 2, strategy), seen()
    for seed in some_of(range(1, 4), 1):
        found, _ = logged_run(FALLING, 2, strategy, "server 1", seed)
        assert same_bits(found.weights, undisturbed.weights)
        assert_same(seen(), expected)


def test_workers_that_do_not_wait_for_each_other_do_not_gather() -> None:
    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
            steepest.gather(1)

    with pytest.raises(ModelRaisedError) as raised:
        run(replace(ADAM, loop=loop), 2, all_in_each(2, sync_every=3))
    assert "leave quorum= and pace= out" in str(raised.value.__cause__)


def assert_same(found: dict[Any, list[Any]], expected: dict[Any, list[Any]]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key][:3] == values[:3], key
        assert all(map(torch.equal, found[key][3:], values[3:])), key


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("quorum", [True, False])
def test_a_loop_goes_on_behind_a_round_with_infinity(
    quorum: bool, fragments: int, delay: int
) -> None:
    """It has seen each of its batches once, also where it had begun the next round from the one that is left out."""
    strategy = all_in_each(
        2, sync_every=3 * fragments, fragments=fragments, delay=delay, nonfinite="skip"
    )
    if not quorum:
        strategy = replace(strategy, quorum=None, grace=None)
    data = samples(48, outputs=3)
    data[1][SamplePlan(48, 6 * BATCH, 0).share(2, 1, 6)[0]] = torch.inf
    script = replace(FALLING, data=data)
    found, log = logged_run(script, 2, strategy)
    assert sum(commit.skipped for commit in log.commits) == 3
    assert same_bits(found.weights, fitted(script, 2, strategy).weights)
    assert [SEEN[worker, 2][:3] for worker in (0, 1)] == [[36, 72, [36]]] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("stops", [1, 3, 4])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_that_is_started_again_goes_on(
    delay: int, fragments: int, stops: int, tmp_path: Path
) -> None:
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    strategy = all_in_each(2, sync_every=4, fragments=fragments, delay=delay)
    undisturbed, expected = run(FALLING, 2, strategy), seen()
    with pytest.raises(InterruptedRunError):
        run(FALLING, 2, strategy, checkpoints=checkpoints, callbacks=[Interrupts(stops)])
    seen()
    again = run(FALLING, 2, strategy, checkpoints=checkpoints)
    assert same_bits(again.weights, undisturbed.weights)
    over = stops // (2 * fragments)  # epochs
    assert again.reports == undisturbed.reports[over:]
    assert_same(seen(), {key: expected[key] for key in expected if key[1] >= over})
