"""Calls between steps, and from callbacks, in which processes die: they return what an undisturbed job would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import DistributedSGD, FailureConfig, ParameterServerStrategy, RunConfig
from steepest.core.messages.message import server_peer, worker_peer
from steepest.core.system import system
from tests.jobs_with_copies import COPIES, TASK, kill, train
from tests.pairs import mostly_full
from tests.reference import same_bits

pytestmark = pytest.mark.usefixtures("anywhere")

X, Y = torch.ones(8, 3), torch.zeros(8, 2)
CALLS: dict[str, Callable[[DistributedSGD, Path], Any]] = {
    "evaluate": lambda trainer, path: trainer.evaluate(TASK.data),
    "weights": lambda trainer, path: trainer.weights(),
    "state_dict": lambda trainer, path: trainer.state_dict(),
    "save": lambda trainer, path: trainer.save(path / "saved"),
    "stats": lambda trainer, path: trainer.stats().step,
    "warmup": lambda trainer, path: trainer.warmup(),
    "set_weights": lambda trainer, path: trainer.set_weights(trainer.weights()),
    "set_strategy": lambda trainer, path: trainer.set_strategy("allreduce"),
    "resize": lambda trainer, path: trainer.resize(2),
}


VICTIMS = [[server_peer(1)], [server_peer(0), worker_peer(1)]]


@pytest.mark.full
@pytest.mark.parametrize("first", mostly_full([0, 1], 1))
def test_a_call_survives_deaths_just_before_it(first: int, tmp_path: Path) -> None:
    """The driver has not noticed them when the call begins. One job for all calls, victims by turns."""
    run_config = RunConfig(failure=FailureConfig(max_failures=20, spares=0))
    with DistributedSGD(
        TASK.creator(), num_workers=3, strategy=COPIES, run_config=run_config
    ) as trainer:
        for steps, (name, call) in enumerate(CALLS.items(), 1):
            if name == "set_strategy":
                break  # it ends with another strategy
            train(trainer, 5)
            undisturbed, loss = trainer.weights(), trainer.evaluate(TASK.data).loss
            kill(trainer, *VICTIMS[(first + steps) % 2])
            found = call(trainer, tmp_path)
            assert trainer.stats().step == 5 * steps
            assert same_bits(trainer.weights(), undisturbed)
            if name == "evaluate":
                assert found.loss == pytest.approx(loss, rel=1e-12)
            if name in ("weights", "state_dict"):
                assert same_bits(found, undisturbed)


def test_a_loss_that_was_handled_meanwhile_is_no_second_death() -> None:
    """A call notices a closed channel, and another thread has put the job together before it says so."""
    with DistributedSGD(TASK.creator(), num_workers=3, strategy=COPIES) as trainer:
        train(trainer, 5)
        supervisor = trainer._supervisor
        before = supervisor.processes()
        kill(trainer, server_peer(1))
        trainer.evaluate(TASK.data)  # handles it
        assert before[0].lost_peer == server_peer(1)
        assert supervisor.has_died_since(before)
        assert supervisor.suspects(server_peer(1), "its channel closed", before[0])
        train(trainer, 5)
        assert trainer.stats().step == 10
        assert len([event for event in trainer.stats().events if event.kind == "left"]) == 1


@pytest.mark.parametrize("name", ["set_strategy", "resize"])
def test_a_change_survives_deaths_just_before_it(name: str, tmp_path: Path) -> None:
    with DistributedSGD(TASK.creator(), num_workers=3, strategy=COPIES) as trainer:
        train(trainer, 5)
        undisturbed = trainer.weights()
        kill(trainer, server_peer(0), worker_peer(1))
        CALLS[name](trainer, tmp_path)
        assert same_bits(trainer.weights(), undisturbed)
        assert trainer.num_workers == (2 if name == "resize" else 3)
        assert (trainer.strategy.name == "allreduce") == (name == "set_strategy")
        train(trainer, 5)
        assert trainer.stats().step == 10


def test_weights_are_read_from_a_callback_although_a_server_has_died() -> None:
    with DistributedSGD(TASK.creator(), num_workers=3, strategy=COPIES) as trainer:
        found = []

        def strike() -> None:
            kill(trainer, server_peer(0))
            found.append(trainer.weights())

        watch = train(trainer, 60, (20, strike))
        assert not watch.functions
        assert len(found) == 1
        assert [result.step for result in watch.results] == list(range(1, 61))


def test_successors_start_and_join_between_calls() -> None:
    """Nobody calls the trainer meanwhile."""
    strategy = ParameterServerStrategy(num_servers=1)
    with DistributedSGD(TASK.creator(), num_workers=3, strategy=strategy) as trainer:
        train(trainer, 5)
        before = trainer.foreach_worker(lambda view: view.pid)
        events = trainer._live().events
        kill(trainer, worker_peer(1))
        deadline = system().now() + 120
        waiting = system().event()
        while not events and system().now() < deadline:
            waiting.wait(0.05)
        assert [event.kind for event in events] == ["replaced"]
        after = trainer.foreach_worker(lambda view: view.pid)
        assert (before[0], before[2]) == (after[0], after[2])
        assert before[1] != after[1]


def test_steps_that_are_lost_between_two_calls_are_taken_again() -> None:
    """What only the dead server held comes from the snapshot; the next `fit` ends where it would have ended."""
    strategy = ParameterServerStrategy(num_servers=2, chunk_bytes=64)
    failure = FailureConfig(snapshot_every=10)
    with DistributedSGD(
        TASK.creator(), num_workers=3, strategy=strategy, run_config=RunConfig(failure=failure)
    ) as trainer:
        train(trainer, 35)
        kill(trainer, server_peer(1))
        train(trainer, 20)
        assert trainer.stats().step == 55
