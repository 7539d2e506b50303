"""What attaches to a worker of dense models: when its exchange is called, and what is said where it lacks one."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, LocalStrategy, ParameterServerStrategy, TorchModel
from steepest.core.config.compression import TopK
from steepest.core.engine.exchange import NOTHING_YET, Arrived, Exchange, ExchangeAround
from steepest.core.engine.extension import Extension
from steepest.core.engine.job import Job
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.topology import HostMap
from steepest.core.messages.message import Message, Peer, Send
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError
from steepest.extensions import EXTENSIONS
from steepest.testing import InProcessCluster, linear_model_creator
from tests.modes import make
from tests.reference import same_bits
from tests.table_tasks import table_task

#: One step in calls of an exchange: chunks while the model computes, then what the report says of them.
STEP = r"begin( ready)+ logged end"


class Noting(ExchangeAround):
    """Notes which of its methods are called, and on which threads."""

    def __init__(self, inner: Exchange, calls: list[str], threads: set[int]) -> None:
        super().__init__(inner)
        for name in ("begin_life", "begin", "ready", "logged", "end", "committed", "left_out"):
            setattr(self, name, self._noting(name, getattr(inner, name), calls, threads))

    def _noting(
        self, name: str, function: Callable[..., Any], calls: list[str], threads: set[int]
    ) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            threads.add(threading.get_ident())
            return function(*arguments, **options)

        return noted


class Stammering(ExchangeAround):
    """Receives each message twice."""

    def receive(self, source: Peer, message: Message) -> Arrived:
        copy = replace(message)
        first, again = self.inner.receive(source, message), self.inner.receive(source, copy)
        return first if again == NOTHING_YET else again


class Stammers(Extension):
    """Has each worker's exchange receive each message twice."""

    def exchange(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, send: Send
    ) -> Exchange:
        return Stammering(exchange)


class Notes(Extension):
    """Stands around each worker's exchange."""

    def __init__(self) -> None:
        self.calls: dict[int, list[str]] = {}
        self.threads: set[int] = set()

    def exchange(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, send: Send
    ) -> Exchange:
        calls = self.calls.setdefault(worker, [])
        return Noting(exchange, calls, self.threads)


def without_finite_gradients(worker: int, device: int) -> TorchModel:
    return TorchModel(
        torch.nn.Linear(2, 1),
        loss=torch.nn.functional.mse_loss,
        data=(torch.full((8, 2), math.nan), torch.zeros(8, 1)),
        batch_size=4,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


def cluster(strategy: Strategy, **settings: Any) -> InProcessCluster:
    return InProcessCluster(linear_model_creator(), num_workers=2, strategy=strategy, **settings)


#: A job for each implementation of `Exchange`, and for what else attaches to workers: the contract runs over all.
JOBS: dict[str, Callable[..., InProcessCluster]] = {
    "ps": partial(cluster, ParameterServerStrategy()),
    "async": partial(cluster, ParameterServerStrategy(mode="async")),
    "allreduce": partial(cluster, AllreduceStrategy()),
    "compression": partial(cluster, ParameterServerStrategy(compression=TopK(0.5))),
    "local": partial(cluster, LocalStrategy(sync_every=2)),
    "aggregator": partial(
        cluster, ParameterServerStrategy(num_servers=2), hosts=HostMap((0, 0), (0, 1), gathers=True)
    ),
    "tables": partial(make, "sync", table_task(), 2),
    "tables beforehand": partial(make, "sync", table_task(), 2, settings={"table_staleness": 2}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", JOBS)
def test_an_exchange_is_called_as_promised(name: str) -> None:
    plain = JOBS[name]()
    plain.step(3)
    notes = Notes()
    noted = JOBS[name](extensions=[*EXTENSIONS, notes])
    noted.step(3)
    assert same_bits(plain.weights(), noted.weights())
    assert notes.threads == {threading.get_ident()}
    assert sorted(notes.calls) == [0, 1]
    for calls in notes.calls.values():
        steps = " ".join(call for call in calls if call not in ("committed", "left_out"))
        assert re.fullmatch(f"begin_life( {STEP}){{3}}", steps), steps
        assert "committed" in calls[calls.index("end") :]
        assert "left_out" not in calls


@pytest.mark.parametrize("name", JOBS)
def test_a_message_that_comes_twice_changes_nothing(name: str) -> None:
    plain, twice = JOBS[name](), JOBS[name](extensions=[*EXTENSIONS, Stammers()])
    plain.step(3)
    twice.step(3)
    assert same_bits(plain.weights(), twice.weights())


def test_an_update_that_is_left_out_is_said_to_its_exchange() -> None:
    notes = Notes()
    job = InProcessCluster(
        without_finite_gradients,
        extensions=[*EXTENSIONS, notes],
        num_workers=2,
        strategy=ParameterServerStrategy(nonfinite="skip"),
    )
    job.step(1)
    job.wait(job.workers[0].at_version(0, 1, lambda replicas: None), "weights")
    assert "left_out" in notes.calls[0]
    assert "committed" not in notes.calls[0]


@pytest.mark.parametrize(
    ("strategy", "hosts", "said"),
    [
        (LocalStrategy(), None, "workers with an optimizer of their own"),
        (ParameterServerStrategy(compression=TopK(0.5)), None, "travel as Largest"),
        (ParameterServerStrategy(), HostMap((0, 0), (0,), gathers=True), "has an aggregator"),
    ],
    ids=["local", "compression", "aggregator"],
)
def test_a_worker_says_what_it_lacks(strategy: Strategy, hosts: HostMap | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        cluster(strategy, hosts=hosts, extensions=())
