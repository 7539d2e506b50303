"""Workers of real processes that are killed: training goes on with successors, and nobody else notices."""

from __future__ import annotations

import logging
import math
import signal
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

from steepest import Callback, DistributedSGD, FailureConfig, RunConfig, StepResult
from steepest.core.messages.message import worker_peer
from steepest.errors import ConfigurationError
from steepest.runtime.job_runtime import runtime
from steepest.testing import InProcessCluster, replay
from tests.living import pids
from tests.pairs import mostly_full
from tests.reference import Task, difference, same_bits, samples, sgd
from tests.step_callbacks import Kill
from tests.strikes import later, send_signal

pytestmark = pytest.mark.usefixtures("anywhere")

STEPS = 60
TASK = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(64))


def test_a_synchronous_run_ends_as_if_nobody_had_died(caplog: pytest.LogCaptureFixture) -> None:
    straight = InProcessCluster(TASK.creator(), num_workers=2)
    straight.step(STEPS + 10)
    with DistributedSGD(TASK.creator(), num_workers=2) as trainer:
        trainer.fit(steps=10, progress=False)
        before = pids(trainer)
        with caplog.at_level(logging.WARNING, "steepest"):
            last = trainer.fit(steps=STEPS - 10, callbacks=[Kill(20, [before[1]])], progress=False)
        assert last.step == STEPS
        after = pids(trainer)
        assert after[0] == before[0]
        assert after[1] != before[1]
        (line,) = [
            record.getMessage()
            for record in caplog.records
            if "has taken its place" in record.getMessage()
        ]
        assert line.startswith("worker 1 on ")
        assert f"(pid {before[1]}) died in step " in line
        send_signal(after[0], signal.SIGKILL)  # between two steps
        trainer.fit(steps=10, progress=False)
        assert difference(trainer.weights(), straight.weights()) < 1e-12
        assert trainer.stats().replaced == 2
        assert len(set(pids(trainer)) - {*before, *after}) == 1


@pytest.mark.parametrize("strategy", mostly_full(["async", "ssp"], "async"))
def test_an_asynchronous_run_is_explained_by_its_log(strategy: str) -> None:
    with DistributedSGD(
        TASK.creator(), num_workers=2, strategy=strategy, run_config=RunConfig(keep_log=True)
    ) as trainer:
        victim = pids(trainer)[0]
        trainer.fit(steps=STEPS, callbacks=[Kill(10, [victim])], progress=False)
        while trainer.stats().replaced < 1:
            trainer.fit(steps=50, progress=False)  # it does not wait for the successor
        log = trainer.log()
        assert same_bits(replay(log, TASK.creator()), trainer.weights())
        taken = [push.share for commit in log.commits for push in commit.pushes]
        assert len(set(taken)) == len(taken)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def test_successors_take_the_others_buffers_and_the_place_in_the_data() -> None:
    task = Task(normalised, sgd(momentum=0.9), samples(64), batch_size=4)
    straight = InProcessCluster(task.creator(), num_workers=2)
    straight.step(20)
    with DistributedSGD(task.creator(), num_workers=2) as trainer:
        trainer.fit(steps=12, progress=False)
        others = trainer.foreach_model(lambda model: model.state())[0]
        send_signal(pids(trainer)[1], signal.SIGKILL)
        watch = trainer._live().watches[worker_peer(1)]
        runtime().wait([watch], 10)  # a call to it in this moment would fail
        states = trainer.foreach_model(
            lambda model: model.state()
        )  # it is replaced before the call
        assert all(torch.equal(states[1][name], value) for name, value in others.items())
        trainer.fit(steps=8, progress=False)
        assert difference(trainer.weights(), straight.weights()) < 1e-12
        assert trainer.evaluate(samples(16)).samples == 16
        send_signal(pids(trainer)[1], signal.SIGKILL)
        runtime().wait([trainer._live().watches[worker_peer(1)]], 10)
        trainer.set_strategy("async")
        send_signal(pids(trainer)[1], signal.SIGKILL)  # whose life is known to the new coordinator
        trainer.fit(steps=3, progress=False)
        assert len(set(pids(trainer))) == 2  # which waits for the successor
        assert trainer.stats().replaced == 3


def test_who_dies_too_often_is_not_replaced_again() -> None:
    with DistributedSGD(
        TASK.creator(), num_workers=2, run_config=RunConfig(failure=FailureConfig(max_failures=1))
    ) as trainer:
        first = pids(trainer)
        send_signal(first[1], signal.SIGKILL)
        trainer.fit(steps=3, progress=False)
        second = pids(trainer)
        send_signal(second[1], signal.SIGKILL)
        assert trainer.fit(steps=3, progress=False).step == 6
        assert trainer.num_workers == 1, "the other one continues alone"
        assert "max_failures=1" in trainer.stats().events[-1].line


@pytest.mark.parametrize("wrong", [-1, 1.5, None])
def test_a_wrong_number_of_failures_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_failures"):
        RunConfig(failure=FailureConfig(max_failures=wrong))


@pytest.mark.few(1)
@pytest.mark.also_real
@pytest.mark.parametrize("strategy", ["ps", "async"])
def test_who_is_silent_is_replaced_by_a_spare_process(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_config = RunConfig(failure=FailureConfig(heartbeat=1.0, spares=1), keep_log=True)
    with DistributedSGD(
        TASK.creator(), num_workers=2, strategy=strategy, run_config=run_config
    ) as trainer:
        trainer.fit(steps=5, progress=False)
        trainer._supervisor.observation.reserve._spares[0].placing.get()  # it is up
        stopped = pids(trainer)[1]
        send_signal(stopped, signal.SIGSTOP)
        with caplog.at_level(logging.WARNING, "steepest"):
            trainer.fit(steps=100, progress=False)
            while trainer.stats().replaced < 1:
                trainer.fit(steps=100, progress=False)  # asynchronous ones do not wait for it
        (line,) = [
            record.getMessage()
            for record in caplog.records
            if "has taken its place" in record.getMessage()
        ]
        assert f"(pid {stopped}) died in step" in line
        assert "no sign of life for" in line
        log = trainer.log()
        assert same_bits(replay(log, TASK.creator()), trainer.weights())
        taken = [push.share for commit in log.commits for push in commit.pushes]
        assert sorted(taken) == list(range(len(taken)))


def test_who_stands_still_for_a_moment_is_not_replaced() -> None:
    straight = InProcessCluster(TASK.creator(), num_workers=2)
    straight.step(600)
    with DistributedSGD(
        TASK.creator(), num_workers=2, run_config=RunConfig(failure=FailureConfig(heartbeat=20.0))
    ) as trainer:
        before = pids(trainer)
        go_on = partial(send_signal, before[1], signal.SIGCONT)
        wakes: list[Thread] = []

        class Stop(Callback):
            awake = False

            def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
                if result.step == 20:
                    send_signal(before[1], signal.SIGSTOP)
                    wakes.append(later(1.0, go_on))
                self.awake |= bool(wakes) and not wakes[0].is_alive()

        stop = Stop()
        trainer.fit(steps=600, callbacks=[stop], progress=False)
        assert stop.awake, "nobody waited for it: this tests nothing"
        assert pids(trainer) == before
        assert difference(trainer.weights(), straight.weights()) < 1e-12
        assert trainer.stats().events == ()


def test_a_successor_waits_for_who_stands_still_for_a_moment() -> None:
    straight = InProcessCluster(TASK.creator(), num_workers=3)
    straight.step(200)
    run_config = RunConfig(failure=FailureConfig(heartbeat=20.0, patience=math.inf))
    with DistributedSGD(TASK.creator(), num_workers=3, run_config=run_config) as trainer:
        before = pids(trainer)

        class KillAndStop(Callback):
            def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
                if result.step == 20:
                    send_signal(before[2], signal.SIGSTOP)
                    send_signal(before[1], signal.SIGKILL)
                    later(4.0, partial(send_signal, before[2], signal.SIGCONT))

        trainer.fit(steps=200, callbacks=[KillAndStop()], progress=False)
        assert pids(trainer)[::2] == before[::2]
        assert same_bits(trainer.weights(), straight.weights())
        assert trainer.stats().replaced == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "run_config",
    [
        RunConfig(failure=FailureConfig(patience=math.inf)),
        RunConfig(failure=FailureConfig(patience=math.inf, spares=1)),
    ],
)
def test_successors_of_two_who_die_together(run_config: RunConfig) -> None:
    straight = InProcessCluster(TASK.creator(), num_workers=3)
    straight.step(200)
    with DistributedSGD(TASK.creator(), num_workers=3, run_config=run_config) as trainer:
        trainer.fit(steps=20, progress=False)
        before = pids(trainer)

        class KillTwo(Callback):
            def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
                if result.step == 40:
                    send_signal(before[1], signal.SIGKILL)
                    send_signal(before[2], signal.SIGKILL)

        trainer.fit(steps=180, callbacks=[KillTwo()], progress=False)
        assert same_bits(trainer.weights(), straight.weights())
        assert trainer.stats().replaced == 2


@pytest.mark.parametrize(
    ("name", "wrong"), [("heartbeat", 0), ("heartbeat", "1"), ("spares", -1), ("spares", 0.5)]
)
def test_wrong_settings_of_watching_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        FailureConfig(**{name: wrong})
