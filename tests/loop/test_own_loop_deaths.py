"""Processes die while a user's own loop runs: its result is that of one process, each sample once per epoch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steepest
from steepest import FailureConfig, ParameterServerStrategy
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.commit_log import CommitLog
from steepest.core.engine.sample_places import SamplePlaces
from steepest.errors import PeerLostError
from tests.own_loop_runs import STRATEGIES
from tests.own_loops import (
    BATCH,
    SAMPLES,
    Parts,
    Script,
    accumulating,
    adversarial,
    alone,
    plain,
    without_loader,
)
from tests.random_examples import some_of
from tests.reference import Task, Weights, difference, perceptron, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


class Average:
    """The running mean of a model's weights, updated after each step."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.steps = model, 0
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self) -> None:
        self.steps += 1
        for name, parameter in self._model.named_parameters():
            self.values[name].mul_(0.7).add_(parameter.detach(), alpha=0.3)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for name, value in state["values"].items():
            self.values[name].copy_(value)


AVERAGES: dict[int, Average] = {}
KEPT: dict[int, Any] = {}


def averaging(parts: Parts, epochs: int) -> None:
    """A scheduler by step, one by epoch, a mean of weights, and a count, all of which follow each step."""
    average = Average(parts.model)
    kept = steepest.register(average=average, count=0, epochs=0)
    by_step, by_epoch = parts.schedulers
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            loss.backward()
            pause(random.choice((1e-3, 1e-2)))
            parts.optimizer.step()
            by_step.step()
            average.update()
            kept.count += 1
        by_epoch.step()
        kept.epochs += 1
        steepest.report(loss=loss)
    AVERAGES[steepest.rank()], KEPT[steepest.rank()] = average, kept


class Two(Script):
    """With two schedulers, of which one multiplies what the other sets."""

    def _parts(self, loader: Any) -> Parts:
        parts = super()._parts(loader)
        by_step = torch.optim.lr_scheduler.MultiplicativeLR(parts.optimizer, lambda _: 0.95)
        by_epoch = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1, 0.5)
        parts.schedulers = (by_step, by_epoch)
        return parts


SCRIPT = Two(averaging, optimizer=sgd(momentum=0.9), data=samples(15), epochs=4)
TASK = Task(optimizer=sgd(momentum=0.9), data=SCRIPT.data, batch_size=BATCH)
WORKERS = 3


def counting_at_once(parts: Parts, epochs: int) -> None:
    """What counts and reports before each step, not after it."""
    kept = steepest.register(count=0)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            kept.count += 1
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            loss.backward()
            steepest.report(loss=loss)
            pause(random.choice((1e-3, 1e-2)))
            parts.optimizer.step()
    KEPT[steepest.rank()] = kept


@dataclass
class Struck:
    """A run in which processes have died."""

    weights: Weights
    rows: list[dict[str, Any]]
    events: dict[str, str]  # by kind: the line of the last one
    log: CommitLog
    reports: list[dict[str, float]]

    @property
    def same_workers(self) -> bool:
        """Whether there were as many workers in each step."""
        few = {"left", "returned", "resized"} & self.events.keys()  # maybe within a step, too
        return not few and {row["workers"] for row in self.rows} == {WORKERS}


def struck(script: Any, strategy: Any, seed: int, deaths: int, workers: int = WORKERS) -> Struck:
    """Run a script while processes die at moments drawn from a seed."""
    draw = random.Random(seed)
    random.seed(seed)  # of the pauses in scripts
    simulation = Simulation(seed)

    def strike() -> None:
        if living := simulation.living():
            simulation.world.kill(draw.choice(living), "it was killed. connection error code 2.")

    class Deaths(steepest.Callback):
        """Begins to count events when training begins."""

        def on_fit_begin(self, sgd: Any, steps: int) -> None:
            for _ in range(deaths):
                simulation.at_event(draw.randrange(1, 400), strike)

        def on_fit_end(self, sgd: Any) -> None:
            simulation.forget_faults()
            sgd.state_dict()  # steps that a death has undone are taken again
            self.log = sgd.log()

    failure, observer = FailureConfig(snapshot_every=3), Deaths()
    with simulation.running():
        found = steepest.run(
            script,
            num_workers=workers,
            strategy=strategy,
            run_config=run_config(failure=failure, keep_log=True),
            callbacks=[observer],
            progress=False,
        )
        events = {event["event"]: event["line"] for event in found.history.events}
        rows = list(found.history.steps)
        return Struck(dict(found.state_dict), rows, events, observer.log, list(found.reports))


def check(strategy: Any, seed: int, deaths: int = 1) -> None:
    """Check what a loop with schedulers and a mean of weights finds."""
    AVERAGES.clear()
    KEPT.clear()
    found = struck(SCRIPT, strategy, seed, deaths)
    averages, kept, rows = dict(AVERAGES), dict(KEPT), found.rows
    for row in rows:
        rate = 0.1 * 0.95 ** (row["step"] - 1) * 0.5 ** row["epoch"]
        assert row["learning_rate"][0] == pytest.approx(rate), row["step"]
    counts = {(kept[rank].count, kept[rank].epochs) for rank in range(rows[-1]["workers"])}
    assert counts == {(len(rows), SCRIPT.epochs)}
    if found.same_workers:
        assert difference(found.weights, SCRIPT.alone(WORKERS)) < 1e-12
        for average in averages.values():
            assert difference(average.values, AVERAGES[0].values) < 1e-12


def check_weights(script: Any, strategy: Any, seed: int, deaths: int = 1) -> None:
    """Check what a loop finds that takes several steps for a batch."""
    found = struck(script, strategy, seed, deaths)
    if found.same_workers:
        assert difference(found.weights, alone(script, WORKERS)) < 1e-12


def drawing() -> None:
    """Each worker draws its data, by generators that nobody has seeded for it, before each of two steps of a round."""
    policy = perceptron()
    policy, optimizer = steepest.prepare(policy, torch.optim.Adam(policy.parameters(), lr=0.02))
    for _ in steepest.epochs(5):
        for _ in range(2):
            pause(1e-3)
            x = torch.randn(2, 3, dtype=torch.float64) * random.random() + np.random.rand()
            DRAWN.setdefault(steepest.rank(), []).append(x)
            optimizer.zero_grad()
            policy(x).square().mean().backward()
            optimizer.step()


def drawing_noise() -> None:
    """Two networks with an optimizer each, for which noise is drawn."""
    generator, critic = perceptron(), nn.Linear(2, 1).double()
    first = torch.optim.Adam(critic.parameters(), lr=0.02)
    second = torch.optim.Adam(generator.parameters(), lr=0.05)
    loader: Any = DataLoader(TensorDataset(*samples(12)), batch_size=BATCH, shuffle=True)
    generator, critic, first, second, loader = steepest.prepare(
        generator, critic, first, second, loader
    )
    for _ in steepest.epochs(3):
        for x, y in loader:
            pause(1e-3)
            first.zero_grad()
            fake = generator(x + torch.randn_like(x)).detach()
            (critic(fake) - critic(y)).mean().backward()
            first.step()
            second.zero_grad()
            (-critic(generator(x + torch.randn_like(x)))).mean().backward()
            second.step()


DRAWN: dict[int, list[torch.Tensor]] = {}


@pytest.mark.few(1)
@pytest.mark.parametrize("script", [drawing, drawing_noise])
def test_what_a_loop_draws_is_drawn_again_after_a_death(script: Any) -> None:
    """The successor draws what the dead worker would have drawn, and each worker something else."""
    DRAWN.clear()
    strategy = STRATEGIES["ps, two copies"]
    whole = struck(script, strategy, 1, 0).weights
    assert len({x.sum().item() for drawn in DRAWN.values() for x in drawn}) == sum(
        map(len, DRAWN.values())
    )
    for seed in range(1, 4):
        found = struck(script, strategy, seed, 1)
        if found.same_workers:
            assert difference(found.weights, whole) < 1e-12


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_spare_process_has_run_what_stands_before_the_loop(strategy: str) -> None:
    """Whichever worker dies: it asks for its rank when it has taken that one's place. The bits are the same."""
    began: list[float] = []
    simulation = Simulation(1)
    script = Two(averaging, optimizer=sgd(momentum=0.9), data=samples(15), epochs=4)

    def slow() -> None:
        began.append(simulation.scheduler.now)
        pause(0.5)  # it loads data
        script()

    class Death(steepest.Callback):
        def on_step(self, sgd: Any, result: Any) -> None:
            if result.step == 3:
                pause(2.0)
                self.at = simulation.scheduler.now
                victim = next(p for p in simulation.living() if p.name == "steepest worker 1")
                simulation.world.kill(victim, "it was killed. connection error code 2.")

    failure, death = FailureConfig(spares=1, patience=math.inf, snapshot_every=1), Death()
    with simulation.running():
        found = steepest.run(
            slow,
            num_workers=2,
            strategy=strategy,
            run_config=run_config(failure=failure),
            callbacks=[death],
            progress=False,
        )
    assert sum(at < death.at for at in began) == 3
    assert difference(found.state_dict, script.alone(2)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_deaths(strategy: str) -> None:
    check(STRATEGIES[strategy], 1, deaths=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_process_dies(strategy: str, seed: int) -> None:
    check(STRATEGIES[strategy], seed)


def at_event(
    script: Any, strategy: Any, copies: int, event: int = 0, workers: int = 2
) -> tuple[list[Any], int]:
    """The step, epoch, samples and loss of each row of a run whose coordinator dies; and the events of the run."""
    simulation = Simulation(1)

    def strike() -> None:
        living = {each.name: each for each in simulation.living()}
        victim = living.get("steepest server 0") or living.get("steepest worker 0")
        if victim is not None:
            simulation.world.kill(victim, "it was killed. connection error code 2.")

    failure = FailureConfig(patience=math.inf, snapshot_every=copies)
    with simulation.running():
        if event:
            simulation.at_event(event, strike)
        found = steepest.run(
            script,
            num_workers=workers,
            strategy=strategy,
            run_config=run_config(failure=failure),
            progress=False,
        )
        rows = [
            [row[x] for x in ("step", "epoch", "samples", "loss")] for row in found.history.steps
        ]
        return rows, simulation.world.events


@pytest.mark.few(3)
@pytest.mark.parametrize("part", range(1, 13))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whenever_the_coordinator_dies_the_history_has_all_of_each_step(
    strategy: str, part: int
) -> None:
    """Also of the steps whose results it had not sent, and where the job goes back to a copy of a later step."""
    for script, copies in ((Script(plain), 1), (Script(accumulating), 7)):
        expected, events = at_event(script, STRATEGIES[strategy], copies)
        found, _ = at_event(script, STRATEGIES[strategy], copies, events * part // 13)
        assert found == [pytest.approx(row) for row in expected]


@pytest.mark.few(3)
@pytest.mark.parametrize("part", range(1, 13))
@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_whenever_the_coordinator_dies_in_a_step_of_several_updates_all_samples_are_counted(
    mode: str, part: int
) -> None:
    strategy = ParameterServerStrategy(mode=mode, num_servers=2, replication=2, chunk_bytes=64)
    script = Script(plain)
    _, events = at_event(script, strategy, 7, workers=3)
    rows, _ = at_event(script, strategy, 7, events * part // 13, workers=3)
    assert sum(samples for _, _, samples, _ in rows) == script.epochs * SAMPLES
    assert all(loss > 0 for _, _, _, loss in rows)


@pytest.mark.parametrize("micros", [1, 2])
def test_a_batch_follows_another_of_the_same_worker_alone(micros: int) -> None:
    places = SamplePlaces(devices=1, shares=2, micros=micros)
    places.use(SamplePlan(samples=16, global_batch=8, seed=0))
    all_batches = [place for number in range(4) for place in places.of(number)]
    for before in all_batches:
        for place in all_batches:
            later_step = place[0] // 2 > before[0] // 2
            next_micro_batch = place[:2] == before[:2] and place[2] == before[2] + 1
            follows = places.where(place).follows(places.where(before))
            assert follows == (later_step or next_micro_batch), (before, place)


def test_a_worker_gets_another_number_while_its_step_is_not_committed() -> None:
    check(STRATEGIES["ps, two copies"], 69, deaths=2)


@pytest.mark.full
def test_a_scheduler_by_epoch_is_known_where_one_batch_of_an_epoch_was_left() -> None:
    check(STRATEGIES["allreduce, two copies"], 1014)
    check(STRATEGIES["allreduce, two copies"], 2033, deaths=2)  # before its first step


def test_a_run_ends_with_the_last_process_that_may_be_replaced() -> None:
    """As fast as processes come up: no call is made again in vain."""
    simulation = Simulation(1)

    def ending(parts: Parts, epochs: int) -> None:
        plain(parts, epochs)
        simulation.runtime.exit(3)

    script, began = Script(ending, epochs=1), simulation.scheduler.now
    config = run_config(failure=FailureConfig(max_failures=1, patience=math.inf))
    with simulation.running(), pytest.raises(PeerLostError) as raised:
        steepest.run(script, num_workers=2, run_config=config, progress=False)
    assert "died: Worker exits with code 3 (processes died there too often" in str(raised.value)
    assert simulation.scheduler.now - began < 4.0


def gathering_twice(parts: Parts, epochs: int) -> None:
    """Two steps for a batch, before each of which all workers' outputs are gathered."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            for _ in range(2):
                parts.optimizer.zero_grad()
                own = parts.model(x)
                steepest.weight(3.0 * len(x))
                everything, targets = steepest.gather((own, y))
                (own @ everything.T - y @ targets.T).square().mean().backward()
                parts.optimizer.step()


def check_gathering_twice(strategy: str, seed: int) -> None:
    optimizer = sgd(lr=0.02, momentum=0.5)
    script = Script(gathering_twice, optimizer=optimizer, epochs=3, data=samples(12))
    found = struck(script, STRATEGIES[strategy], seed, deaths=2)
    if found.same_workers:
        assert difference(found.weights, script.alone(WORKERS)) < 1e-11


def test_a_loop_whose_step_a_change_has_voided_waits_until_it_is_taken_again() -> None:
    check_gathering_twice("ps, two copies", 101)


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "seed"), [("allreduce", 202), ("allreduce, two copies", 215)])
def test_a_worker_joins_amid_a_batch_that_the_others_have_begun_with_fewer(
    strategy: str, seed: int
) -> None:
    check_gathering_twice(strategy, seed)


@pytest.mark.full
def test_one_worker_fewer_and_one_more_before_the_loop_that_gathers_has_a_turn() -> None:
    check_gathering_twice("ps", 208)


@pytest.mark.full
def test_what_was_gathered_in_steps_that_are_lost_is_not_taken_for_what_is_gathered_there_now() -> (
    None
):
    check_gathering_twice("ps", 216)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_what_a_loop_counts_and_reports_before_a_step_counts_once_where_that_is_taken_again(
    seed: int,
) -> None:
    KEPT.clear()
    script = Script(counting_at_once, data=samples(15))
    found = struck(script, STRATEGIES["ps"], seed, deaths=1)
    steps = len(found.rows)
    assert {each.count for each in KEPT.values()} == {steps}
    assert len(found.reports) == steps


@pytest.mark.few(1)
@pytest.mark.parametrize("patience", [0.0, math.inf])
def test_all_workers_die_and_what_their_loops_have_kept_is_of_the_job_s_step(
    patience: float,
) -> None:
    simulation, struck_at = Simulation(1), list[int]()
    random.seed(1)

    def strike() -> None:
        for process in simulation.living():
            if "worker" in str(process):
                simulation.world.kill(process, "it was killed. connection error code 2.")

    class Deaths(steepest.Callback):
        def on_step(self, sgd: Any, result: Any) -> None:
            if result.step == 8 and not struck_at:
                struck_at.append(result.step)
                simulation.at_event(5, strike)

    KEPT.clear()
    failure = FailureConfig(snapshot_every=3, patience=patience)
    with simulation.running():
        found = steepest.run(
            SCRIPT,
            num_workers=2,
            strategy=STRATEGIES["ps"],
            run_config=run_config(failure=failure),
            callbacks=[Deaths()],
            progress=False,
        )
        rows = list(found.history.steps)
    assert {(each.count, each.epochs) for each in KEPT.values()} == {(len(rows), SCRIPT.epochs)}
    assert difference(dict(found.state_dict), SCRIPT.alone(2)) < 1e-12


def test_it_is_told_that_fewer_workers_go_on_with_what_others_have_taken_over() -> None:
    found = struck(SCRIPT, STRATEGIES["allreduce"], 1005, deaths=2)
    assert {row["workers"] for row in found.rows} == {2}
    assert "going on with 2 workers, 4 samples a step, from step 1 on" in found.events["recovered"]


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_die_at_many_moments(strategy: str) -> None:
    for seed in some_of(range(2, 10), 3):
        check(STRATEGIES[strategy], seed, deaths=1 + seed % 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("script", [adversarial, without_loader])
def test_a_process_dies_between_two_steps_for_one_batch(script: Any, strategy: str) -> None:
    for seed in range(2):
        check_weights(script, STRATEGIES[strategy], seed)


@pytest.mark.few(3)
@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", [adversarial, without_loader])
def test_processes_die_between_steps_for_one_batch(script: Any, strategy: str) -> None:
    for seed in some_of(range(2, 8), 2):
        check_weights(script, STRATEGIES[strategy], seed, deaths=1 + seed % 2)
