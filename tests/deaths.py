"""Workers of a simulated job that die as they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from steepest.core.messages.message import Kind, Message
from steepest.testing import InProcessCluster
from tests.modes import make
from tests.reference import Task, samples, sgd


def kill_senders(cluster: InProcessCluster, deaths: Iterable[tuple[int, Kind, int]]) -> None:
    """Has workers die as they send their n-th message of a kind: (worker, kind, n), one after the other."""
    counted: Counter[tuple[int, Kind]] = Counter()
    left = list(deaths)

    def die(message: Message) -> list[Message]:
        if message.source is not None and message.source.role == "worker" and left:
            sent = message.source.index, message.kind
            counted[sent] += 1
            worker, kind, n = left[0]
            if sent == (worker, kind) and counted[sent] >= n:
                left.pop(0)
                counted.clear()
                cluster.kill(worker)
                return []
        return [message]

    cluster.network.filter = die


TASK = Task(optimizer=sgd(momentum=0.9), data=samples(23))


def doomed(name: str, deaths: list[tuple[int, Kind, int]], **options: Any) -> InProcessCluster:
    """A job in which workers die as they send their n-th message of a kind: (worker, kind, n), one after the other."""
    creator = options.pop("creator", None)
    task = TASK if creator is None else SimpleNamespace(creator=lambda: creator)
    cluster = make(name, task, replaces=True, **options)
    kill_senders(cluster, deaths)
    return cluster
