"""Audits of whole jobs: who computes wrongly is told and replaced, its node left out; a resumed job audits the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import steepest
from steepest import AllreduceStrategy, DistributedSGD, FailureConfig, RunConfig
from steepest.core.messages.message import worker_peer
from steepest.core.protocol.audits import drawn
from steepest.errors import ConfigurationError
from steepest.runtime.job_runtime import runtime
from steepest.testing import linear_model_creator, replay
from tests.core import models
from tests.living import places_of
from tests.reference import same_bits
from tests.simulation.run import Simulation, run_config
from tests.strikes import kill_this_process

SEED = 2


def flipped(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient whose first element has another lowest bit."""
    found = gradient.clone()
    found.view(-1)[:1].view(torch.int64).bitwise_xor_(1)
    return found


def creator(is_wrong: Callable[[int], bool]) -> Any:
    """Makes linear models, whose gradients are wrong where a function of the worker's index says so."""
    make = linear_model_creator(samples=48)

    def create(worker_index: int, device_index: int) -> Any:
        model = make(worker_index, device_index)
        model.module.weight.register_hook(
            lambda gradient: flipped(gradient) if is_wrong(worker_index) else None
        )
        return model

    return create


@pytest.mark.parametrize("strategy", ["ps", AllreduceStrategy(replication=2)], ids=["ps", "all"])
def test_a_node_that_computes_wrongly_is_left_out(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No wrong gradient becomes part of the weights, and another worker comes to another node."""
    bad: list[str] = []
    dying: list[int] = []

    def is_wrong(worker: int) -> bool:
        if worker in dying:
            dying.remove(worker)
            kill_this_process()
        return runtime().node in bad

    patient = FailureConfig(patience=math.inf)
    config = run_config(audit=1.0, audit_replaces=True, keep_log=True, failure=patient)
    caplog.set_level(logging.WARNING, "steepest")
    with (
        Simulation(3, cpus=(1, 1, 1, 1), switches=300_000).running(),
        DistributedSGD(
            creator(is_wrong), 3, strategy=strategy, run_config=config, seed=SEED
        ) as sgd,
    ):
        dying.append(1)  # so that it is not worker 1's first life
        sgd.fit(steps=3, progress=False)
        assert len(sgd.stats().events) == 1
        before = places_of(sgd)[worker_peer(1)]
        bad.append(before.node)
        while not {"resized", "returned"} & {event.kind for event in sgd.stats().events}:
            sgd.fit(steps=5, progress=False)
        sgd.fit(steps=5, progress=False)
        assert sgd.num_workers == 3
        assert before.node not in {place.node for place in places_of(sgd).values()}
        events = sgd.stats().events[1:]
        assert same_bits(replay(sgd.log(), creator(lambda worker: False)), sgd.weights())
    assert [event.kind for event in events[:2]] == ["difference", "left"]
    first = events[0].line
    assert first in caplog.text
    assert f"worker 1 on {before.host} (node {before.node[:12]})" in first
    assert "worker 1 computes wrongly: it alone has got another result" in first


def test_a_resumed_job_audits_the_steps_that_it_would_have_audited(tmp_path: Path) -> None:
    config = run_config(audit=0.4)
    found: list[int] = []

    def train(sgd: DistributedSGD, steps: int) -> None:
        sgd.fit(steps=steps, progress=False)
        found.extend(int(e.line.split()[3].rstrip(":")) for e in sgd.stats().events)

    make = creator(lambda worker: worker == 2)
    with Simulation(1).running():
        with DistributedSGD(make, 3, run_config=config, seed=SEED) as sgd:
            train(sgd, 12)
            sgd.save(tmp_path / "checkpoint")
        with DistributedSGD(make, 3, run_config=config, seed=SEED) as sgd:
            sgd.restore(tmp_path / "checkpoint")
            train(sgd, 12)
    assert found == [step + 1 for step in range(24) if drawn(SEED, step, 0.4) is not None]


def once(worker: int, device: int) -> Any:
    """A model whose third gradient, of the second step, is wrong on worker 1."""
    model, count = models.classifier(worker, device), 0

    def flip(gradient: torch.Tensor) -> torch.Tensor | None:
        nonlocal count
        count += 1
        return flipped(gradient) if (worker, count) == (1, 3) else None

    next(model.module.parameters()).register_hook(flip)
    return model


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_processes_name_the_one_that_was_wrong_and_train_as_without_it() -> None:
    found = []
    for create, audit in ((models.classifier, 0.0), (once, 1.0)):
        config = RunConfig(runtime="processes", audit=audit)
        with DistributedSGD(create, 2, run_config=config, seed=SEED) as sgd:
            results = [sgd.step() for _ in range(4)]
            assert ("audit" in results[-1].timings) == (audit > 0)
            found.append((sgd.weights(), [e.kind for e in sgd.stats().events]))
            lines = [row["line"] for row in sgd.history.events]
    assert [events for _, events in found] == [[], ["difference"]]
    assert lines[0].startswith("audit of step 2: ")
    assert "worker 1 computes wrongly: it did not get the same result twice" in lines[0]
    assert same_bits(found[0][0], found[1][0])


def test_own_loops_and_tables_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="loop of your own"):
        steepest.run(lambda: None, run_config=RunConfig(audit=0.1))
