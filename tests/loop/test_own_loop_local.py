"""Loops of users' own whose workers make updates by themselves, as they do under `fit` with the same settings."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import DistributedSGD, FailureConfig, LocalStrategy
from steepest.core.models.torch import TorchModel
from steepest.errors import CheckpointError, ConfigurationError, ModelRaisedError
from tests.own_loop_runs import Found, InterruptedRunError, Interrupts, run
from tests.own_loops import (
    BATCH,
    Parts,
    Script,
    accumulating,
    adding_up,
    adversarial,
    by_epoch,
    plain,
    with_closures,
    without_loader,
)
from tests.random_examples import some_of
from tests.reference import difference, same_bits, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


ADAM = Script(
    plain,
    optimizer=lambda module: torch.optim.Adam(module.parameters(), lr=0.02),
    schedule=falling,
    data=samples(29),
)
MOMENTUM = replace(ADAM, optimizer=sgd(momentum=0.9))

SETTINGS = {
    "every batch": LocalStrategy(sync_every=1, num_servers=2, chunk_bytes=48),
    "every third": LocalStrategy(sync_every=3, chunk_bytes=48),
    "momentum of the servers'": LocalStrategy(
        sync_every=4, outer_lr=0.7, outer_momentum=0.9, nesterov=True, num_servers=2
    ),
    "fragments": LocalStrategy(sync_every=4, fragments=2, num_servers=2),
    "fragments and a part of the own": LocalStrategy(sync_every=4, fragments=2, blend=0.5),
    "compressed": LocalStrategy(sync_every=3, compression="int8"),
    "delay": LocalStrategy(sync_every=4, delay=3, num_servers=2),
    "delay and fragments": LocalStrategy(sync_every=6, fragments=2, delay=1, blend=0.5),
    "delay and compressed": LocalStrategy(sync_every=4, delay=1, compression="int8"),
}


def fitted(script: Script, workers: int, strategy: LocalStrategy) -> Found:
    """The same model, data and optimizer under `fit`."""

    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            script.model(),
            loss=nn.functional.mse_loss,
            data=script.data,
            batch_size=BATCH,
            optimizer=script.optimizer,
            lr_scheduler=script.schedule,
        )

    with (
        Simulation(seed=1).running(),
        DistributedSGD(create, workers, strategy=strategy, run_config=run_config()) as trainer,
    ):
        trainer.fit(epochs=script.epochs, progress=False)
        return Found(dict(trainer.state_dict()), [], list(trainer.history.steps), [])


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [3, 2, 1])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("script", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_a_loop_has_the_bits_of_fit(script: Script, name: str, workers: int) -> None:
    found, expected = (each(script, workers, SETTINGS[name]) for each in (run, fitted))
    assert same_bits(found.weights, expected.weights)
    assert [row["loss"] for row in found.steps] == [row["loss"] for row in expected.steps]
    assert [row["samples"] for row in found.steps] == [row["samples"] for row in expected.steps]


def test_a_worker_trains_by_itself_between_two_exchanges() -> None:
    """The test above can fail: another number of batches is another result."""
    every_third, every = (run(MOMENTUM, 2, LocalStrategy(sync_every=n)).weights for n in (3, 1))
    assert difference(every_third, every) > 1e-4


SEEN: dict[tuple[int, int], list[Any]] = {}


def watching(parts: Parts, epochs: int) -> None:
    """A running mean and a count after each step, and values of all workers after each epoch."""
    mean = nn.ParameterList(p.detach().clone() for p in parts.model.parameters())
    kept = steepest.register(mean=mean, count=0, best=math.inf)
    for epoch in steepest.epochs(epochs):
        for x, y in parts.loader:
            pause(1e-3 * (1 + steepest.rank()))
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
            for scheduler in parts.schedulers:
                scheduler.step()
            kept.count += 1
            with torch.no_grad():
                for own, parameter in zip(mean, parts.model.parameters(), strict=True):
                    own.lerp_(torch.full_like(parameter, kept.count), 0.3)
        with torch.no_grad():
            x, y = (column[steepest.rank() :: 2] for column in WATCHED.data)
            losses = steepest.gather(nn.functional.mse_loss(parts.model(x), y))
        kept.best = min(kept.best, losses.mean().item())
        steepest.report(best=kept.best)
        rate = parts.optimizer.param_groups[0]["lr"]
        found = [p.detach().clone() for p in mean]
        SEEN[steepest.rank(), epoch] = [kept.count, kept.best, rate, losses, *found]


WATCHED = Script(watching, schedule=falling, data=samples(48))


def seen() -> dict[tuple[int, int], list[Any]]:
    found = dict(SEEN)
    SEEN.clear()
    return found


def check_death(strategy: LocalStrategy, seed: int, kind: str = "worker") -> None:
    """Check that all that a loop sees is as if nobody had died."""
    undisturbed = run(WATCHED, 2, strategy)
    expected = seen()
    simulation, draw = Simulation(seed), random.Random(seed)

    class Death(steepest.Callback):
        """Kills a process at some moment of the training."""

        def on_fit_begin(self, sgd: Any, steps: int) -> None:
            if not struck:
                simulation.at_event(draw.randrange(1, 90), kill)

        def on_fit_end(self, sgd: Any) -> None:
            simulation.forget_faults()

    struck: list[Any] = []

    def kill() -> None:
        struck.append([each for each in simulation.living() if kind in str(each)][seed % 2])
        simulation.world.kill(struck[0], "it was killed. connection error code 2.")

    with simulation.running():
        found = steepest.run(
            WATCHED,
            num_workers=2,
            strategy=strategy,
            run_config=run_config(failure=FailureConfig(patience=math.inf, snapshot_every=2)),
            callbacks=[Death()],
            progress=False,
        )
        assert same_bits(dict(found.state_dict), undisturbed.weights)
        assert found.reports == undisturbed.reports
    assert struck
    assert_same(
        {key: value for key, value in seen().items() if key[1] == 2},
        {key: value for key, value in expected.items() if key[1] == 2},
    )


def assert_same(found: dict[Any, list[Any]], expected: dict[Any, list[Any]]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key][:3] == values[:3], key
        assert all(map(torch.equal, found[key][3:], values[3:])), key


DEATHS = [
    LocalStrategy(sync_every=3, num_servers=2, chunk_bytes=64),
    LocalStrategy(sync_every=4, replication=2, chunk_bytes=64),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", DEATHS, ids=["servers", "workers"])
@pytest.mark.parametrize("seed", range(2))
def test_a_worker_that_dies_changes_nothing(strategy: LocalStrategy, seed: int) -> None:
    check_death(strategy, seed)


SLOW_LINKS = LocalStrategy(
    sync_every=6, fragments=2, delay=2, num_servers=2, replication=2, chunk_bytes=64
)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strategy", [SLOW_LINKS, replace(SLOW_LINKS, fragments=1, delay=5)])
def test_a_server_that_dies_changes_nothing_though_loops_are_ahead(
    strategy: LocalStrategy, seed: int
) -> None:
    check_death(strategy, seed, "server")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fragments", "delay", "delay and fragments"])
def test_behind_an_epoch_loops_see_the_weights_of_all(name: str) -> None:
    """In its middle each has its own."""
    found: dict[tuple[int, int], torch.Tensor] = {}

    def loop(parts: Parts, epochs: int) -> None:
        for epoch in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
            weights = torch.cat([p.detach().flatten() for p in parts.model.parameters()])
            found[steepest.rank(), epoch] = weights
            steepest.report(gathered=steepest.gather(weights[None]).std(0).max())

    result = run(replace(ADAM, loop=loop, data=samples(48)), 2, SETTINGS[name])
    assert [row["gathered"] for row in result.reports] == [0.0] * 3
    assert all(torch.equal(found[0, epoch], found[1, epoch]) for epoch in range(3))
    last = torch.cat([value.flatten() for value in result.weights.values()])
    assert torch.equal(found[0, 2], last)


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("strategy", DEATHS, ids=["servers", "workers"])
def test_a_worker_that_dies_at_many_moments_changes_nothing(strategy: LocalStrategy) -> None:
    for seed in some_of(range(2, 20), 3):
        check_death(strategy, seed)


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["every third", "fragments", "delay", "delay and fragments"])
def test_a_run_that_is_started_again_goes_on(name: str, tmp_path: Path) -> None:
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    expected = run(ADAM, 2, SETTINGS[name])
    with pytest.raises(InterruptedRunError):
        run(ADAM, 2, SETTINGS[name], checkpoints=checkpoints, callbacks=[Interrupts(4)])
    again = run(ADAM, 2, SETTINGS[name], checkpoints=checkpoints)
    assert same_bits(again.weights, expected.weights)


def test_what_else_loops_do() -> None:
    """Batches that are added up, a scheduler by epoch, and sums have the results of updates that are written out."""
    by_batch = LocalStrategy(sync_every=1)
    for script in (
        Script(accumulating, data=samples(24)),
        Script(by_epoch, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)),
    ):
        assert difference(run(script, 2, by_batch).weights, script.alone(2)) < 1e-12
    script = Script(adding_up, optimizer=sgd(lr=0.02), reduction="sum", data=samples(24))
    assert difference(run(script, 1, LocalStrategy(sync_every=3)).weights, script.alone(1)) < 1e-12


def gathering(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, _ in parts.loader:
            steepest.gather(parts.model(x))


@pytest.mark.parametrize(
    ("script", "strategy", "message"),
    [
        (
            Script(watching, data=samples(48)),
            LocalStrategy(sync_every=3, pace="speed", num_servers=1),
            "where workers do not wait for each other",
        ),
        (adversarial, "local", "several optimizers with strategy=.local"),
        (without_loader, "local", "a loop without a loader with strategy=.local"),
        (Script(gathering), "local", "between the batches of an epoch"),
    ],
)
def test_what_is_not_possible_is_refused(script: Any, strategy: Any, message: str) -> None:
    with pytest.raises((ConfigurationError, ModelRaisedError)) as raised:
        run(script, 2, strategy)
    assert re.search(message, f"{raised.value} {raised.value.__cause__}")


def test_lbfgs_is_refused() -> None:
    script = Script(with_closures, optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    with pytest.raises(
        (ConfigurationError, ModelRaisedError), match="whose step.. needs a closure"
    ):
        run(script, 2, "local")


@pytest.mark.parametrize(("before", "after"), [("ps", "local"), ("local", "ps")])
def test_a_run_of_the_other_kind_is_not_gone_on_with(
    before: str, after: str, tmp_path: Path
) -> None:
    """Its place in the data is kept in another way."""
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(ADAM, 2, before, checkpoints=checkpoints, callbacks=[Interrupts(2)])
    with pytest.raises(CheckpointError, match="give the strategy with which it was written"):
        run(ADAM, 2, after, checkpoints=checkpoints)
