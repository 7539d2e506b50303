"""A job whose servers keep copies of each other's state, and processes of it that are killed after steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from steepest import (
    DistributedSGD,
    ParameterServerStrategy,
    RunConfig,
)
from steepest.core.messages.message import Peer
from steepest.testing import replay
from tests.living import places_of
from tests.reference import Task, difference, same_bits, samples, sgd
from tests.step_callbacks import Watch
from tests.strikes import send_signal

TASK = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(20_000), batch_size=1)
LOGGED = RunConfig(keep_log=True)
COPIES = ParameterServerStrategy(num_servers=2, replication=2, chunk_bytes=64)


def kill(trainer: DistributedSGD, *peers: Peer) -> None:
    places = places_of(trainer)
    for pid in [places[peer].pid for peer in peers]:
        send_signal(pid, signal.SIGKILL)


def train(trainer: DistributedSGD, steps: int, *moments: tuple[int, Callable[[], Any]]) -> Watch:
    watch = Watch(*moments)
    trainer.fit(steps=steps, callbacks=[watch], progress=False)
    return watch


def check(trainer: DistributedSGD, watch: Watch, steps: int) -> None:
    """Each step has come once, and the log gives the weights bit for bit."""
    assert [result.step for result in watch.results] == list(range(1, steps + 1))
    replayed, found = replay(trainer.log(), TASK.creator()), trainer.weights()
    # what a group adds up a replay adds up in another order
    assert same_bits(replayed, found) or (
        trainer.strategy.reduces and difference(replayed, found) < 1e-12
    )
    assert not watch.functions, "nobody was killed: this tests nothing"
