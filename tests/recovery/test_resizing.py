"""Workers and servers that come and go at the user's word: nothing is lost, nothing repeated."""

from __future__ import annotations

import signal
from itertools import pairwise
from typing import Any

import pytest
import ray

from steepest import (
    AllreduceStrategy,
    Callback,
    DeadlineConfig,
    DistributedSGD,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)
from steepest.core.system import system
from steepest.errors import ConfigurationError, ResourcesError
from steepest.runtime.process import ProcessActor
from steepest.runtime.recovery.growth import Wanted
from tests.living import pids
from tests.pairs import mostly_full
from tests.reference import Task, difference, samples, serially, sgd
from tests.strikes import send_signal

pytestmark = pytest.mark.usefixtures("anywhere")

TASK = Task(optimizer=sgd(lr=0.05, momentum=0.9), data=samples(50))


@pytest.mark.few(2)
@pytest.mark.also_real
@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        AllreduceStrategy(data_plane="gloo", sharded=True, chunk_bytes=64),
        ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    ],
    ids=["allreduce", "sharded groups", "ps"],
)
def test_between_two_steps_it_is_as_if_it_had_always_been_so(strategy: Any) -> None:
    sizes = [(2, 7), (3, 6), (1, 5), (2, 4)]
    with DistributedSGD(TASK.creator(), num_workers=2, strategy=strategy) as trainer:
        before = pids(trainer)
        trainer.fit(steps=7, progress=False)
        trainer.resize(num_workers=3)
        assert pids(trainer)[:2] == before
        trainer.fit(steps=6, progress=False)
        trainer.resize(num_workers=1)
        assert pids(trainer) == before[:1]
        assert trainer.fit(steps=5, progress=False).step == 18
        trainer.resize(num_workers=2)
        trainer.fit(steps=4, progress=False)
        assert trainer.num_workers == len(set(pids(trainer))) == 2
        assert trainer.stats().step == 22
        assert difference(trainer.weights(), serially(TASK, sizes)) < 1e-12


def test_servers_come_and_go_with_their_state() -> None:
    strategy = ParameterServerStrategy(num_servers=1, chunk_bytes=64)
    with DistributedSGD(TASK.creator(), num_workers=2, strategy=strategy) as trainer:
        trainer.fit(steps=5, progress=False)
        for servers in (3, 2):
            trainer.resize(num_servers=servers)
            assert trainer.num_servers == trainer.stats().num_servers == servers
            trainer.fit(steps=5, progress=False)
        assert difference(trainer.weights(), TASK.train(2, 15)) < 1e-12


class At(Callback):
    """Calls a function after some step."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function
        self.results: list[StepResult] = []

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.results.append(result)
        if result.step == self.step:
            self.function(trainer)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "async"])
def test_while_training_is_under_way(strategy: str) -> None:
    """It goes on until the new worker is up; every sample of each epoch is in exactly one step."""
    task = Task(optimizer=sgd(lr=0.01), data=samples(600), batch_size=1)
    run_config = RunConfig(keep_log=True)
    with DistributedSGD(
        task.creator(), num_workers=1, strategy=strategy, run_config=run_config
    ) as trainer:
        grown = system().event()

        def grow(trainer: DistributedSGD) -> None:
            trainer.resize(num_workers=2)
            grown.set()

        watch = At(3, grow)
        while trainer.num_workers == 1:
            trainer.fit(steps=600, callbacks=[watch], progress=False)
        trainer.fit(steps=20, callbacks=[watch], progress=False)
        assert grown.is_set()
        steps = [result.step for result in watch.results]
        assert steps == list(range(1, len(steps) + 1))
        sizes = [result.samples for result in watch.results]
        assert {1, 2} <= set(sizes)
        for before, after in pairwise(result.epoch for result in watch.results):
            assert before is not None
            assert after in (before, before + 1)
        by_epoch = dict.fromkeys({result.epoch for result in watch.results}, 0)
        for result in watch.results:
            by_epoch[result.epoch] += result.samples
        whole = [by_epoch[epoch] for epoch in sorted(by_epoch, key=str)[:-1]]
        assert whole == [600] * len(whole)
        if strategy == "ps":
            alone = sizes.index(2)  # of two workers an epoch's last step may have one sample
            runs = [(1, alone), (2, len(sizes) - alone)]
            assert difference(trainer.weights(), serially(task, runs)) < 1e-9


@pytest.mark.real
def test_what_cannot_be_is_refused_and_training_goes_on() -> None:
    with DistributedSGD(
        TASK.creator(), num_workers=2, run_config=RunConfig(deadlines=DeadlineConfig(start=4.0))
    ) as trainer:
        trainer.step()
        with pytest.raises(ResourcesError, match="50 workers never fit"):
            trainer.resize(num_workers=50)
        for wrong in (0, 1.5):
            with pytest.raises(ConfigurationError, match="workers"):
                trainer.resize(num_workers=wrong)  # type: ignore[arg-type]
        trainer.set_strategy(AllreduceStrategy())
        with pytest.raises(ConfigurationError, match="servers live in the workers"):
            trainer.resize(num_servers=2)
        assert trainer.step().step == 2
        assert trainer.num_workers == 2


@pytest.mark.real
def test_within_bounds_it_uses_what_the_cluster_has(ray_cluster: None) -> None:
    """Two of eight CPUs are free, then one more; then a worker dies, whose place is taken by another."""
    taken = [ray.util.placement_group([{"CPU": 1.0}]) for _ in range(6)]
    ray.get([group.ready() for group in taken])
    task = Task(
        optimizer=sgd(lr=0.01), data=samples(20_000), batch_size=1
    )  # in one epoch, whose last step is smaller
    while (
        ray.available_resources().get("CPU", 0.0) != 2.0
    ):  # until earlier jobs have given theirs back
        ray.wait([taken[0].ready()], timeout=1.0)
    try:
        with DistributedSGD(
            task.creator(),
            num_workers=(1, 3),
            run_config=RunConfig(deadlines=DeadlineConfig(start=8.0)),
        ) as trainer:
            assert trainer.num_workers == 2
            first = pids(trainer)
            trainer.fit(steps=20, progress=False)
            ray.util.remove_placement_group(taken.pop())
            runs = [(2, 20)]
            while trainer.num_workers == 2:
                watch = At(-1, None)
                trainer.fit(steps=100, callbacks=[watch], progress=False)
                sizes = [result.samples for result in watch.results]
                runs += [(count, sizes.count(count)) for count in (2, 3) if count in sizes]
            assert pids(trainer)[:2] == first
            assert difference(trainer.weights(), serially(task, runs)) < 1e-9
            trainer.resize(1)  # the places of the others are given back
            while ray.available_resources().get("CPU", 0.0) != 2.0:
                ray.wait([taken[0].ready()], timeout=1.0)
            assert trainer.step().samples == 1
    finally:
        for group in taken:
            ray.util.remove_placement_group(group)


@pytest.mark.real
def test_without_a_successor_it_goes_on_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(optimizer=sgd(lr=0.01), data=samples(600), batch_size=1)
    run_config = RunConfig(deadlines=DeadlineConfig(start=5.0))
    with DistributedSGD(task.creator(), num_workers=3, run_config=run_config) as trainer:
        cluster = trainer._live()
        wanted = Wanted(trainer.strategy, 1, 3, exact=False)  # it began with all three
        trainer._supervisor.observation.wanted = wanted
        trainer.fit(steps=20, progress=False)
        first = pids(trainer)
        nowhere = ray.remote(ProcessActor).options(num_cpus=1000)
        monkeypatch.setattr(
            cluster, "start_worker", lambda index, seat: nowhere.remote("nowhere", b"", 1)
        )
        send_signal(first[1], signal.SIGKILL)
        trainer.fit(steps=40, progress=False)
        assert trainer.num_workers == 2
        assert pids(trainer) == [first[0], first[2]]
        assert trainer.stats().step == 60
        assert difference(trainer.weights(), serially(task, [(3, 20), (2, 40)])) < 1e-9


@pytest.mark.parametrize("wrong", [(0, 2), (3, 2), (1,), (1, 2, 3), (1, "2")])
def test_wrong_bounds_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="num_workers"):
        DistributedSGD(TASK.creator(), num_workers=wrong)


class Sizes(Callback):
    """Gives a job one number of workers after the other, and counts the samples of each epoch."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)
        self.asked = 0
        self.seen: dict[int | None, int] = {}
        self.lengths: list[int] = []
        self.ends: list[int | None] = []
        self.steps = 0

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        self.lengths.append(steps)

    def on_length(self, sgd: Any, steps: int) -> None:
        self.lengths.append(steps)

    def on_step(self, sgd: Any, result: StepResult) -> None:
        self.steps += 1
        self.seen[result.epoch] = self.seen.get(result.epoch, 0) + result.samples
        if self.sizes and sgd.num_workers == (self.asked or sgd.num_workers):
            self.asked = self.sizes.pop(0)
            sgd.resize(num_workers=self.asked)

    def on_epoch_end(self, sgd: Any, result: StepResult) -> None:
        self.ends.append(result.epoch)


@pytest.mark.parametrize("strategy", mostly_full(["allreduce", "groups", "ps"], "allreduce"))
def test_epochs_are_whole_whatever_happens_to_sizes_meanwhile(strategy: str) -> None:
    """Two workers, then four, then one: a step covers more or fewer samples, an epoch each of them once."""
    chosen = AllreduceStrategy(data_plane="gloo") if strategy == "groups" else strategy
    sizes = Sizes(4, 1)
    task = Task(optimizer=sgd(lr=0.001), data=samples(4001), batch_size=2)
    run_config = RunConfig(deadlines=DeadlineConfig(start=60.0))
    with DistributedSGD(
        task.creator(), num_workers=2, strategy=chosen, run_config=run_config
    ) as trainer:
        while trainer.num_workers != 1:
            sizes.seen, sizes.ends, sizes.lengths, sizes.steps = {}, [], [], 0
            trainer.fit(epochs=4, callbacks=[sizes], progress=False)
            assert list(sizes.seen.values()) == [4001] * 4
            assert list(sizes.seen) == sizes.ends
            assert sizes.lengths[-1] == sizes.steps
        assert len(sizes.lengths) > 1, "its size did not change amid an epoch: this tests nothing"
