"""Faults by script inside the processes of real workers."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from steepest import DeadlineConfig, DistributedSGD, FailureConfig, RunConfig
from steepest.errors import DeadlineError, ModelRaisedError
from steepest.testing import Fault, InProcessCluster, Moment, replay, with_faults
from tests.reference import Task, Weights, difference, same_bits, samples, sgd

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("machine")]

TASK = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(64))


def straight(steps: int) -> Weights:
    """What two workers get in peace."""
    cluster = InProcessCluster(TASK.creator(), num_workers=2)
    cluster.step(steps)
    return cluster.weights()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_model_raises_in_its_step_and_training_goes_on(strategy: str, tmp_path: Path) -> None:
    faults = [Fault.raises("worker", 1, step=3, at="backward"), Fault.raises("worker", 0, step=8)]
    with DistributedSGD(
        with_faults(TASK.creator(), faults, tmp_path), num_workers=2, strategy=strategy
    ) as trainer:
        trainer.warmup()  # is no step
        with pytest.raises(
            ModelRaisedError, match="worker 1.* in step 4: RuntimeError: scripted: .* at backward"
        ):
            trainer.fit(steps=20, progress=False)
        with pytest.raises(
            ModelRaisedError, match="worker 0.*scripted: raise of worker 0 in step 8 at forward"
        ):
            trainer.fit(steps=17, progress=False)
        done = trainer.stats().step
        trainer.fit(steps=20 - done, progress=False)
        assert difference(trainer.weights(), straight(20)) < 1e-12


def test_workers_die_each_in_its_step_and_life(tmp_path: Path) -> None:
    moments: list[Moment] = ["push", "report"]
    faults = [Fault.kill("worker", life, step=3 + life, at=at) for life, at in enumerate(moments)]
    faults.append(Fault.kill("worker", 1, step=2, life=1))
    with DistributedSGD(with_faults(TASK.creator(), faults, tmp_path), num_workers=2) as trainer:
        trainer.fit(steps=20, progress=False)
        assert trainer.stats().replaced == 3
        assert difference(trainer.weights(), straight(20)) < 1e-12
    lives = {path.name for path in tmp_path.iterdir()}
    assert lives == {
        f"worker-{worker}-life-{life}" for worker in (0, 1) for life in range(2 + worker)
    }


@pytest.mark.full
def test_who_dies_in_every_life_is_given_up(tmp_path: Path) -> None:
    creator = with_faults(TASK.creator(), [Fault.kill("worker", 1, step=0, life=None)], tmp_path)
    with DistributedSGD(
        creator, num_workers=2, run_config=RunConfig(failure=FailureConfig(max_failures=1))
    ) as trainer:
        assert trainer.fit(steps=3, progress=False).step == 3
        assert trainer.num_workers == 1, "the other one continues alone"
        assert len(list(tmp_path.glob("worker-1-*"))) == 2


def test_who_hangs_is_found_and_replaced(tmp_path: Path) -> None:
    creator = with_faults(TASK.creator(), [Fault.hang("worker", 1, step=3, at="push")], tmp_path)
    with DistributedSGD(creator, num_workers=2) as trainer:
        trainer.fit(steps=10, progress=False)
        assert trainer.stats().replaced == 1
        assert difference(trainer.weights(), straight(10)) < 1e-12


@pytest.mark.full
def test_who_hangs_where_nobody_is_replaced_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    creator = with_faults(TASK.creator(), [Fault.hang("worker", 1, step=3, at="push")], tmp_path)
    run_config = RunConfig(
        failure=FailureConfig(max_failures=0), deadlines=DeadlineConfig(step=2.0)
    )
    with DistributedSGD(creator, num_workers=2, run_config=run_config) as trainer:
        pid = trainer.foreach_worker(lambda view: view.pid)[1]
        # the system may stop it some instructions later, when it has pushed what was left
        with pytest.raises(DeadlineError, match=r"step [45] .* still waiting for worker 1"):
            trainer.fit(steps=10, progress=False)
        os.kill(pid, signal.SIGCONT)
        trainer.fit(steps=10 - trainer.stats().step, progress=False)
        assert difference(trainer.weights(), straight(10)) < 1e-12


@pytest.mark.full
def test_who_is_slow_has_fewer_updates_of_an_asynchronous_run(tmp_path: Path) -> None:
    creator = with_faults(TASK.creator(), [Fault.slow("worker", 1, step=1, factor=100)], tmp_path)
    run_config = RunConfig(keep_log=True)
    with DistributedSGD(creator, num_workers=2, strategy="async", run_config=run_config) as trainer:
        trainer.fit(steps=40, progress=False)
        log = trainer.log()
        by = Counter(push.worker for commit in log.commits for push in commit.pushes)
        assert 1 < by[1] < by[0] / 2
        assert same_bits(replay(log, TASK.creator()), trainer.weights())
