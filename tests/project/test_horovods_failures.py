"""Failures that Horovod Elastic is known for, each as a test; the number is that of Horovod's issue.

What is asked of each: training goes on, every step is taken once, each sample is in exactly one
committed step of its epoch, and the log gives the weights bit for bit.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import (
    AllreduceStrategy,
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    TorchModel,
)
from steepest.core.engine.job import ModelCreator
from steepest.errors import StepError
from steepest.testing import replay
from tests.jobs_with_copies import COPIES, LOGGED, TASK, check, kill, train
from tests.living import places_of
from tests.pairs import diagonal, mostly_full
from tests.reference import Task, difference, same_bits, samples, sgd
from tests.strikes import kill_this_process, send_signal

pytestmark = pytest.mark.usefixtures("anywhere")

MEMBERS = AllreduceStrategy(replication=2, chunk_bytes=64)


def pids(trainer: DistributedSGD) -> list[int]:
    return trainer.foreach_worker(lambda view: view.pid)


def kill_all(victims: list[int]) -> None:
    for pid in victims:
        send_signal(pid, signal.SIGKILL)


# --- fewer than the least number, and back (3494: those that stayed and those that came wait for each other) ---


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [COPIES, AllreduceStrategy(sharded=False)], ids=["ps", "all"])
def test_3494_fewer_workers_than_the_least_number_and_back(strategy: Any) -> None:
    """Of three to four workers three die: it waits for others, and goes on with at least three."""
    with DistributedSGD(
        TASK.creator(), num_workers=(3, 4), strategy=strategy, run_config=LOGGED
    ) as trainer:
        first = pids(trainer)
        assert len(first) == 4
        watch = train(trainer, 400, (20, lambda: kill_all(first[:3])))
        check(trainer, watch, 400)
        assert {result.samples for result in watch.results} <= {3, 4}, "fewer took a step"
        assert trainer.num_workers >= 3


# --- a death while state is given to who joins (2995: it ends all), or while all gather (3014: they wait for ever) ---


class Mortal(TorchModel):
    """A model whose process dies when a file says so; the file names the moment and the worker."""

    folder = ""
    worker = 0

    def die(self, moment: str) -> None:
        path = Path(self.folder, f"{moment} {self.worker}")
        if path.exists():
            path.rename(path.with_name(f"died: {path.name}"))
            kill_this_process()

    def state(self) -> Any:
        self.die("gives state")
        return super().state()

    def load_state(self, state: Any) -> None:
        self.die("takes state")
        super().load_state(state)

    def compute_gradients(self, *arguments: Any, **named: Any) -> Any:
        self.die("computes")
        return super().compute_gradients(*arguments, **named)


def mortal_creator(folder: Path) -> ModelCreator:
    """Makes models with a buffer, so that workers have state of their own, which is given to others."""

    def create(worker: int, device: int) -> TorchModel:
        torch.manual_seed(0)
        linear = torch.nn.Linear(3, 2).double()
        linear.register_buffer("steps", torch.zeros(1, dtype=torch.float64))
        model = Mortal(
            linear, loss=torch.nn.functional.mse_loss, data=samples(20_000), batch_size=1,
            optimizer=sgd(lr=0.01, momentum=0.9),
        )  # fmt: skip
        model.folder, model.worker = str(folder), worker
        model.die("is made")
        return model

    return create


MORTAL = [
    ("is made", 3),
    ("takes state", 3),
    ("computes", 3),
    ("gives state", 0),
    ("gives state", 1),
]


@pytest.mark.few(1)
@diagonal(strategy=[COPIES, MEMBERS], death=MORTAL)
def test_2995_a_death_while_state_is_given_to_a_worker_that_joins(
    strategy: Any, death: tuple[str, int], tmp_path: Path
) -> None:
    """Of who joins, or of who is there."""
    moment, worker = death
    creator = mortal_creator(tmp_path)
    with DistributedSGD(creator, num_workers=3, strategy=strategy, run_config=LOGGED) as trainer:

        def join() -> None:
            (tmp_path / f"{moment} {worker}").touch()
            trainer.resize(num_workers=4)

        died = tmp_path / f"died: {moment} {worker}"
        watch = train(trainer, 100, (20, join))
        while trainer.num_workers < 4 and not died.exists():
            trainer.fit(steps=50, callbacks=[watch], progress=False)
        trainer.fit(steps=50, callbacks=[watch], progress=False)
        if not died.exists():
            pytest.skip(f"no process comes to the moment {moment!r} when a worker joins")
        if moment == "is made" and trainer.num_workers < 4:
            trainer.resize(num_workers=4)  # it had not joined, which may end the first request
        while trainer.num_workers < 4:
            trainer.fit(steps=50, callbacks=[watch], progress=False)
        trainer.fit(steps=50, callbacks=[watch], progress=False)
        steps = [result.step for result in watch.results]
        assert steps == list(range(1, len(steps) + 1))
        assert same_bits(replay(trainer.log(), creator), trainer.weights())


def test_3197_all_workers_that_were_there_die_while_others_join() -> None:
    """ "No hosts from previous set remaining": here servers hold the weights."""
    with DistributedSGD(
        TASK.creator(), num_workers=2, strategy=COPIES, run_config=LOGGED
    ) as trainer:
        first = pids(trainer)

        def grow() -> None:
            trainer.resize(num_workers=4)
            kill_all(first)

        watch = train(trainer, 100, (20, grow))
        while trainer.num_workers < 4:
            trainer.fit(steps=50, callbacks=[watch], progress=False)
        check(trainer, watch, len(watch.results))
        assert not set(first) & set(pids(trainer))


# --- survivors fail with the dead (3264), or all are gone ---


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [COPIES, MEMBERS, "async"], ids=["ps", "allreduce", "async"])
def test_3264_survivors_stay_alive_when_half_of_the_workers_are_killed(strategy: Any) -> None:
    run_config = RunConfig(keep_log=True, failure=FailureConfig(spares=0))
    victims = 1 if strategy is MEMBERS else 2  # each chunk has two holders among the members
    with DistributedSGD(
        TASK.creator(), num_workers=4, strategy=strategy, run_config=run_config
    ) as trainer:
        first = pids(trainer)
        watch = train(trainer, 300, (20, lambda: kill_all(first[4 - victims :])))
        check(trainer, watch, 300)
        assert set(first[: 4 - victims]) <= set(pids(trainer)), "survivors died too"


ALL = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(200), batch_size=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [COPIES, "allreduce"], ids=["ps", "allreduce"])
def test_3264_when_no_process_is_left_the_same_command_resumes(
    strategy: Any, tmp_path: Path
) -> None:
    """All workers and servers die at once: the run goes on by itself, or the same program does."""
    run_config = RunConfig(failure=FailureConfig(patience=math.inf))
    killed: list[int] = []

    def program() -> Any:
        with DistributedSGD(
            ALL.creator(),
            num_workers=3,
            strategy=strategy,
            run_config=run_config,
            checkpoints=Checkpoints(tmp_path, every=10),
        ) as trainer:

            def end_all() -> None:
                if not killed:
                    killed.extend([1])
                    kill(trainer, *places_of(trainer))

            train(trainer, 60, (35, end_all))
            assert trainer.stats().step == 60
            return trainer.weights()

    try:
        weights = program()
    except StepError:
        weights = program()
    assert killed, "nobody was killed: this tests nothing"
    assert difference(weights, ALL.train(3, 60)) < 1e-12


# --- samples lost or repeated when workers go (3143, 3399) ---


@pytest.mark.few(1)
@pytest.mark.parametrize("graceful", [True, False], ids=["3399 gracefully", "3143 by death"])
def test_samples_are_neither_lost_nor_repeated_when_workers_go(graceful: bool) -> None:
    task = Task(optimizer=sgd(lr=0.01), data=samples(600), batch_size=1)
    with DistributedSGD(
        task.creator(), num_workers=4, strategy=COPIES, run_config=LOGGED
    ) as trainer:
        first = pids(trainer)
        leave = (
            (lambda: trainer.resize(num_workers=2)) if graceful else (lambda: kill_all(first[2:]))
        )
        watch = train(trainer, 40, (20, leave))
        trainer.fit(epochs=4, callbacks=[watch], progress=False)
        seen = Counter(
            (epoch, sample) for epoch, *where in trainer.log().samples() for sample in range(*where)
        )
        last = max(epoch for epoch, _ in seen)
        whole = {(epoch, sample) for epoch in range(last) for sample in range(600)}
        assert whole <= seen.keys(), "samples were lost"
        assert set(seen.values()) == {1}, "samples were repeated"
        assert last >= 2


# --- a death in the last step is no success of the others (3852) ---


@pytest.mark.few(1)
@pytest.mark.parametrize("before", mostly_full([0, 1, 2], 0, 2))
def test_3852_a_death_in_the_last_steps_is_no_early_end(before: int) -> None:
    with DistributedSGD(
        TASK.creator(), num_workers=2, strategy=COPIES, run_config=LOGGED
    ) as trainer:
        first = pids(trainer)
        watch = train(trainer, 50, (50 - before, lambda: kill_all(first[1:])))
        assert trainer.stats().step == 50
        trainer.fit(steps=50, callbacks=[watch], progress=False)
        check(trainer, watch, 100)


# --- who joins lacks what optimizer and network have gathered (2652) ---


@pytest.mark.parametrize(
    "strategy", [ParameterServerStrategy(num_servers=2), "allreduce"], ids=["ps", "allreduce"]
)
def test_2652_a_worker_that_joins_has_what_optimizer_and_network_have_gathered(
    strategy: Any,
) -> None:
    def network() -> torch.nn.Module:
        layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        return torch.nn.Sequential(*layers).double()

    def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(module.parameters(), lr=0.01, amsgrad=True)

    task = Task(network, adam, data=samples(2000), batch_size=4)
    with DistributedSGD(
        task.creator(), num_workers=2, strategy=strategy, run_config=LOGGED
    ) as trainer:
        trainer.fit(steps=30, progress=False)
        trainer.resize(num_workers=3)
        counted = trainer.foreach_model(lambda model: int(model.module[1].num_batches_tracked))
        assert counted == [30] * 3
        trainer.fit(steps=10, progress=False)
        assert same_bits(replay(trainer.log(), task.creator()), trainer.weights())
