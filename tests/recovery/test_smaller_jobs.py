"""Workers that die while others go on: three or more do not wait, and nothing is lost or repeated."""

from __future__ import annotations

import itertools
import math
import signal
from collections import Counter
from typing import Any

import pytest

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    Event,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    RunConfig,
)
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster, replay
from tests.living import pids
from tests.pairs import diagonal
from tests.reference import Task, difference, same_bits, samples, serially, sgd
from tests.step_callbacks import Watch
from tests.strikes import send_signal

pytestmark = pytest.mark.usefixtures("anywhere")

TASK = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(20_000), batch_size=1)

LOGGED = RunConfig(keep_log=True)


class Seen(Callback):
    """Notes events; raises for one, if told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.events: list[Event] = []
        self.ended = 0

    def on_event(self, trainer: DistributedSGD, event: Event) -> None:
        self.events.append(event)
        if self.error is not None:
            raise self.error

    def on_fit_end(self, trainer: DistributedSGD) -> None:
        self.ended += 1


def killer(*victims: int) -> Any:
    """Kills processes."""

    def kill() -> None:
        for pid in victims:
            send_signal(pid, signal.SIGKILL)

    return kill


def train_until(trainer: DistributedSGD, watch: Watch, *kinds: str) -> None:
    """Trains until something of these kinds has happened, and some steps more."""
    while not {*kinds} & {event.kind for event in trainer.stats().events}:
        trainer.fit(steps=50, callbacks=[watch], progress=False)
    trainer.fit(steps=10, callbacks=[watch], progress=False)


def check(trainer: DistributedSGD, watch: Watch) -> None:
    """Every step was taken, and is what so many workers would have made of it in this process; the log explains it."""
    assert [result.step for result in watch.results] == list(range(1, len(watch.results) + 1))
    assert difference(trainer.weights(), serially(TASK, watch.sizes())) < 1e-9
    log = trainer.log()
    parts = [part.num_workers for part in log.parts if part.commits]  # some have no step
    assert [workers for workers, _ in itertools.groupby(parts)] == [
        workers for workers, _ in watch.sizes()
    ]
    assert same_bits(replay(log, TASK.creator()), trainer.weights())
    seen = Counter(
        sample for epoch, *place in log.samples() for sample in ((epoch, n) for n in range(*place))
    )
    assert (
        len(seen)
        == seen.total()
        == trainer.stats().samples
        == sum(result.samples for result in watch.results)
    )


@pytest.mark.few(1)
@diagonal(
    strategy=["ps", ParameterServerStrategy(num_servers=2, chunk_bytes=64, replication=2)],
    dead=[[1], [0, 2]],
)
def test_the_others_go_on_and_the_successor_gets_its_number(strategy: Any, dead: list[int]) -> None:
    with DistributedSGD(
        TASK.creator(), num_workers=4, strategy=strategy, run_config=LOGGED
    ) as trainer:
        before = pids(trainer)
        watch = Watch((20, killer(*(before[index] for index in dead))))
        # "replaced": it was up before the others had gone on
        train_until(trainer, watch, "returned", "replaced")
        while trainer.num_workers < 4:
            trainer.fit(steps=50, callbacks=[watch], progress=False)
        after = pids(trainer)
        assert [pid for pid in after if pid in before] == [
            pid for i, pid in enumerate(before) if i not in dead
        ]
        if len(dead) == 1:
            (successor,) = set(after) - set(before)
            assert after.index(successor) == dead[0]
        assert len(set(after)) == 4
        # a successor may be there before a step is taken without it
        assert min(workers for workers, _ in watch.sizes()) in range(4 - len(dead), 5)
        check(trainer, watch)
        stats = trainer.stats()
        assert stats.replaced == len(dead)
        left = next(event for event in stats.events if event.kind == "left")
        assert f"worker {dead[0]} on " in left.line
        assert "no update and no sample is lost" in left.line


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "strategy",
    [
        AllreduceStrategy(replication=2, chunk_bytes=64),
        AllreduceStrategy(sharded=False),
        "simple",
    ],
)
def test_the_others_go_on_under_any_strategy(strategy: Any) -> None:
    with DistributedSGD(
        TASK.creator(), num_workers=3, strategy=strategy, run_config=LOGGED
    ) as trainer:
        before = pids(trainer)
        watch = Watch((20, killer(before[1])))
        train_until(trainer, watch, "returned", "replaced")
        assert trainer.num_workers == 3
        assert pids(trainer)[::2] == before[::2]
        assert {workers for workers, _ in watch.sizes()} <= {2, 3}
        check(trainer, watch)
        assert trainer.stats().replaced == 1


def test_one_of_two_is_awaited_where_the_driver_serves() -> None:
    straight = InProcessCluster(TASK.creator(), num_workers=2)
    straight.step(40)
    with DistributedSGD(TASK.creator(), num_workers=2, strategy="simple") as trainer:
        watch = Watch((20, killer(pids(trainer)[1])))
        assert trainer.fit(steps=40, callbacks=[watch], progress=False).step == 40
        assert difference(trainer.weights(), straight.weights()) < 1e-12
        assert trainer.stats().replaced == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "copies", [{"num_servers": 1}, {"replication": 2, "outer_momentum": 0.5, "outer_lr": 0.7}]
)
def test_workers_that_train_by_themselves_go_on(copies: dict[str, Any]) -> None:
    """The dead one's momentum is lost; every sample is in exactly one round of the epoch."""
    x, _ = samples(400)
    task = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=(x, x[:, :2]), batch_size=1)
    strategy = LocalStrategy(sync_every=2, **copies)
    with DistributedSGD(task.creator(), num_workers=3, strategy=strategy) as trainer:
        before, before_loss = pids(trainer), trainer.evaluate(task.data).loss
        watch = Watch((20, killer(before[1])))
        train_until(trainer, watch, "returned", "replaced")
        assert pids(trainer)[::2] == before[::2]
        assert [result.step for result in watch.results] == list(range(1, len(watch.results) + 1))
        by_epoch = Counter[Any]()
        for result in watch.results:
            by_epoch[result.epoch] += result.samples
        assert [by_epoch[epoch] for epoch in range(len(by_epoch) - 1)] == [400] * (
            len(by_epoch) - 1
        )
        assert trainer.evaluate(task.data).loss < before_loss / 2


def test_who_dies_while_others_are_awaited_is_done_without_too() -> None:
    with DistributedSGD(TASK.creator(), num_workers=4, run_config=LOGGED) as trainer:
        before = pids(trainer)
        watch = Watch(
            (10, killer(before[1])),
            (30, killer(before[2])),
            (31, lambda: trainer.resize(num_workers=5)),
        )
        while trainer.num_workers < 5:
            trainer.fit(steps=50, callbacks=[watch], progress=False)
        trainer.fit(steps=10, callbacks=[watch], progress=False)
        assert not watch.functions
        after = pids(trainer)
        assert {before[0], before[3]} < set(after)
        assert len(set(after)) == 5
        check(trainer, watch)


def test_who_dies_again_and_again_is_left_out() -> None:
    run_config = RunConfig(failure=FailureConfig(max_failures=1, spares=0), keep_log=True)
    with DistributedSGD(TASK.creator(), num_workers=3, run_config=run_config) as trainer:
        first = pids(trainer)
        watch = Watch((10, killer(first[1])))
        train_until(trainer, watch, "returned")
        second = pids(trainer)
        watch.functions[0] = killer(second[1])
        train_until(trainer, watch, "resized")  # another worker, in another place
        third = pids(trainer)
        assert third[:2] == [first[0], first[2]]
        assert trainer.num_workers == 3
        lines = [event.line for event in trainer.stats().events if event.kind == "left"]
        assert "left out from now on" in lines[1]
        assert "max_failures=1" in lines[1]
        check(trainer, watch)


def test_two_wait_for_each_other_and_any_number_does_if_told_to() -> None:
    for workers, run_config in (
        (2, RunConfig()),
        (3, RunConfig(failure=FailureConfig(patience=math.inf))),
    ):
        straight = InProcessCluster(TASK.creator(), num_workers=workers)
        straight.step(60)
        with DistributedSGD(TASK.creator(), num_workers=workers, run_config=run_config) as trainer:
            watch = Watch((20, killer(pids(trainer)[1])))
            trainer.fit(steps=60, callbacks=[watch], progress=False)
            assert watch.sizes() == [(workers, 60)]
            assert difference(trainer.weights(), straight.weights()) < 1e-12
            assert [event.kind for event in trainer.stats().events] == ["replaced"]


def test_callbacks_see_each_event_once() -> None:
    with DistributedSGD(TASK.creator(), num_workers=2) as trainer:
        trainer.resize(num_servers=2)
        first, second = Seen(), Seen(RuntimeError("seen"))
        trainer.fit(steps=5, callbacks=[first], progress=False)
        assert [event.kind for event in first.events] == ["resized"]
        with pytest.raises(RuntimeError, match="seen"):
            trainer.fit(
                steps=100,
                callbacks=[Watch((10, killer(pids(trainer)[1]))), first, second],
                progress=False,
            )
        assert [event.kind for event in first.events] == ["resized", "replaced"]
        assert (second.events, second.ended) == (first.events[1:], 1)
        trainer.fit(steps=5, callbacks=[second], progress=False)
        assert tuple(first.events) == trainer.stats().events
        assert len(second.events) == 1


def test_too_few_wait_for_those_who_die_together() -> None:
    """Until one of them has a successor: two may go on without the other's."""
    with DistributedSGD(TASK.creator(), num_workers=3, run_config=LOGGED) as trainer:
        watch = Watch((20, killer(*pids(trainer)[1:])))
        while trainer.stats().replaced < 2:
            trainer.fit(steps=60, callbacks=[watch], progress=False)
        assert trainer.stats().events[0].kind == "replaced"
        check(trainer, watch)


def test_of_two_the_one_who_dies_too_often_is_done_without() -> None:
    run_config = RunConfig(failure=FailureConfig(max_failures=1, spares=0))
    with DistributedSGD(TASK.creator(), num_workers=2, run_config=run_config) as trainer:
        trainer.fit(steps=200, callbacks=[Watch((5, killer(pids(trainer)[1])))], progress=False)
        watch = Watch((225, killer(pids(trainer)[1])))
        trainer.fit(steps=200, callbacks=[watch], progress=False)
        assert trainer.stats().step == 400
        assert any("max_failures=1" in event.line for event in trainer.stats().events)


@pytest.mark.parametrize("wrong", [-1, "1", None, math.nan])
def test_a_wrong_patience_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="patience"):
        RunConfig(failure=FailureConfig(patience=wrong))
