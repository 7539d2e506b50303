"""Jobs of which the only holder of something dies: all go back to one instant, and nothing else shows."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import DistributedSGD, FailureConfig, RunConfig
from steepest.core.messages.message import Peer, server_peer, worker_peer
from steepest.testing import InProcessCluster
from tests.living import places_of
from tests.recovery.snapshot_kinds import KINDS
from tests.reference import Task, Weights, difference, same_bits, samples, sgd
from tests.step_callbacks import Watch
from tests.strikes import send_signal

pytestmark = pytest.mark.usefixtures("anywhere")

TASK = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(64))
WORKERS, STEPS = 3, 60


def kill(trainer: DistributedSGD, victim: Peer) -> None:
    send_signal(places_of(trainer)[victim].pid, signal.SIGKILL)


def buffers(model: Any) -> Weights:
    return dict(model.state())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("buffers", server_peer(0)),
        ("buffers, no servers", worker_peer(1)),
        ("int8", server_peer(1)),
        ("local", worker_peer(0)),
    ],
)
def test_a_run_that_was_set_back_ends_with_the_bits_of_an_undisturbed_one(
    kind: str, victim: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, strategy = KINDS[kind]
    straight = InProcessCluster(task.creator(), num_workers=WORKERS, strategy=strategy)
    straight.step(STEPS)
    at = straight.client.position
    replicas = [
        straight.wait(w.at_version(at.generation, at.version, lambda replicas: replicas), "it")
        for w in straight.workers
    ]
    run_config = RunConfig(failure=FailureConfig(snapshot_every=7, patience=math.inf))
    with DistributedSGD(
        task.creator(), num_workers=WORKERS, strategy=strategy, run_config=run_config
    ) as trainer:
        for _ in range(20):
            trainer.step()
        snapshots = trainer._supervisor.snapshots
        assert snapshots.taken is not None
        assert 0 < snapshots.taken.shared.version <= 20
        monkeypatch.setattr(snapshots, "remember", lambda: None)  # there will be no newer one
        watch = Watch((30, lambda: kill(trainer, victim)))
        trainer.fit(steps=STEPS - 20, callbacks=[watch], progress=False)
        (event,) = trainer.stats().events
        assert event.kind == "recovered"
        # a callback may hear of step 30 when the one that dies holds nothing that others have not
        assert any(text in event.line for text in ("lost, and made again", "no update"))
        assert same_bits(trainer.weights(), straight.weights())
        for own, expected in zip(trainer.foreach_model(buffers), replicas, strict=True):
            assert same_bits(own, buffers(expected.models[0]))


def test_a_death_before_the_first_step_costs_nothing() -> None:
    with DistributedSGD(TASK.creator(), num_workers=2) as trainer:
        trainer._supervisor.snapshots.ensure()
        kill(trainer, server_peer(0))
        trainer.fit(steps=20, progress=False)
        assert difference(trainer.weights(), TASK.train(2, 20)) < 1e-12
        assert [event.kind for event in trainer.stats().events] == ["recovered"]


@pytest.mark.parametrize("way", ["restore", "set_weights"])
def test_a_death_soon_after_another_state_was_set_keeps_that_state(
    way: str, tmp_path: Path
) -> None:
    with DistributedSGD(TASK.creator(), num_workers=2) as trainer:
        trainer.fit(steps=10, progress=False)
        trainer.save(tmp_path / "saved")
        trainer.fit(steps=5, progress=False)
        if way == "restore":
            trainer.restore(tmp_path / "saved")
        else:
            weights = trainer.weights()
            trainer.set_weights({name: torch.full_like(w, 9.0) for name, w in weights.items()})
        trainer._supervisor.snapshots.ensure()
        kill(trainer, server_peer(0))
        trainer.step()
        if way == "restore":
            assert difference(trainer.weights(), TASK.train(2, 11)) < 1e-12
        else:
            assert all(bool((w > 8.0).all()) for w in trainer.weights().values())
        assert [event.kind for event in trainer.stats().events] == ["recovered"]
