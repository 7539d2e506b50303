"""Processes that hold chunks and are killed: with copies nothing is lost, not even the coordinator."""

from __future__ import annotations

import logging
import math
import signal
from typing import Any

import pytest

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
)
from steepest.core.messages.message import server_peer
from steepest.errors import PeerLostError
from tests.living import pids, places_of
from tests.pairs import mostly_full
from tests.reference import Task, difference, samples, sgd
from tests.step_callbacks import Kill
from tests.strikes import send_signal

pytestmark = pytest.mark.usefixtures("anywhere")

TASK = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(64))
TWICE = ParameterServerStrategy(replication=2, chunk_bytes=64)


def server_pid(trainer: DistributedSGD, index: int) -> int:
    return places_of(trainer)[server_peer(index)].pid


@pytest.mark.few(1)
@pytest.mark.also_real
@pytest.mark.parametrize("server", [0, 1])  # the coordinator lives beside the first
def test_a_server_that_dies_is_replaced_and_nothing_is_lost(
    server: int, caplog: pytest.LogCaptureFixture
) -> None:
    with DistributedSGD(TASK.creator(), num_workers=2, strategy=TWICE) as trainer:
        trainer.fit(steps=10, progress=False)
        before = pids(trainer)
        with caplog.at_level(logging.WARNING, "steepest"):
            last = trainer.fit(
                steps=30, callbacks=[Kill(20, [server_pid(trainer, server)])], progress=False
            )
            assert last.step == 40
            step = 40
            while len(trainer.stats().events) < 2:  # until its successor is there
                step = trainer.step().step
        (line,) = [
            record.getMessage() for record in caplog.records if "took over" in record.getMessage()
        ]
        assert f"server {server}" in line
        send_signal(server_pid(trainer, 1 - server), signal.SIGKILL)  # between two steps
        assert trainer.fit(steps=10, progress=False).step == step + 10
        assert difference(trainer.weights(), TASK.train(2, step + 10)) < 1e-12
        assert trainer.stats().replaced == 2
        assert [event.kind for event in trainer.stats().events] == [
            "left",
            "resized",
        ] * 2  # nobody waited
        assert (trainer.num_servers, trainer.strategy) == (2, TWICE)
        assert trainer.stats().step == step + 10
        assert pids(trainer) == before


@pytest.mark.parametrize(
    "strategy", [AllreduceStrategy(replication=2, chunk_bytes=64), AllreduceStrategy(sharded=False)]
)
def test_a_member_of_an_allreduce_dies_and_another_takes_its_place(strategy: Any) -> None:
    run_config = RunConfig(failure=FailureConfig(patience=math.inf))
    with DistributedSGD(
        TASK.creator(), num_workers=3, strategy=strategy, run_config=run_config
    ) as trainer:
        trainer.fit(steps=5, progress=False)
        before = pids(trainer)
        trainer.fit(steps=20, callbacks=[Kill(12, [before[1]])], progress=False)
        after = pids(trainer)
        assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]
        trainer.fit(
            steps=10, callbacks=[Kill(28, [after[0]])], progress=False
        )  # where the coordinator lives
        assert difference(trainer.weights(), TASK.train(3, 35)) < 1e-12


def test_an_asynchronous_run_counts_every_update_once() -> None:
    strategy = ParameterServerStrategy(mode="async", replication=2, chunk_bytes=64)
    with DistributedSGD(TASK.creator(), num_workers=2, strategy=strategy) as trainer:
        trainer.fit(steps=60, callbacks=[Kill(20, [server_pid(trainer, 0)])], progress=False)
        stats = trainer.stats()
        assert (stats.step, stats.version) == (60, 120)
        assert sum(stats.staleness.histogram.values()) == 120


def test_without_copies_it_is_an_error() -> None:
    run_config = RunConfig(failure=FailureConfig(snapshot_every=0))
    with DistributedSGD(TASK.creator(), num_workers=2, run_config=run_config) as trainer:
        trainer.step()
        send_signal(server_pid(trainer, 0), signal.SIGKILL)
        with pytest.raises(PeerLostError, match="server 0 on .* died"):
            trainer.fit(steps=30, progress=False)


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_without_copies_all_go_on_from_the_last_snapshot(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_config = RunConfig(failure=FailureConfig(snapshot_every=10))
    with DistributedSGD(
        TASK.creator(), num_workers=2, strategy=strategy, run_config=run_config
    ) as trainer:
        trainer.fit(steps=5, progress=False)
        victim = server_pid(trainer, 0) if strategy == "ps" else pids(trainer)[1]
        with caplog.at_level(logging.WARNING, "steepest"):
            step = trainer.fit(steps=60, callbacks=[Kill(40, [victim])], progress=False).step
            assert step == 65
            while not trainer.stats().events:  # callbacks hear of a step later than it is taken
                step = trainer.step().step
        (line,) = [
            record.getMessage() for record in caplog.records if "took over" in record.getMessage()
        ]
        assert "made again" in line or "no update and no sample is lost" in line
        assert difference(trainer.weights(), TASK.train(2, step)) < 1e-12
        assert trainer.stats().step == step


@pytest.mark.parametrize("server", mostly_full([0, 1], 0))
def test_a_server_that_is_silent_is_replaced(server: int) -> None:
    run_config = RunConfig(failure=FailureConfig(heartbeat=1.0))
    with DistributedSGD(
        TASK.creator(), num_workers=2, strategy=TWICE, run_config=run_config
    ) as trainer:
        trainer.fit(steps=10, progress=False)
        send_signal(server_pid(trainer, server), signal.SIGSTOP)
        trainer.fit(steps=10, progress=False)
        assert difference(trainer.weights(), TASK.train(2, 20)) < 1e-12
        assert trainer.stats().replaced == 1
