"""A worker that dies and is replaced: nothing is lost, nothing counts twice, the bits are those of a run in peace."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from steepest.core.messages.driver import Failure
from steepest.core.messages.message import Kind, Message, worker_peer
from steepest.core.models.torch import TorchModel
from steepest.errors import PeerLostError
from steepest.testing import InProcessCluster
from tests.deaths import TASK, doomed
from tests.inside import replicas_of
from tests.modes import EACH, MODES, check, counters, make, settle, shares, trained, worker_weights
from tests.random_examples import seeds
from tests.reference import same_bits, samples

WAYS = ["sync", "backup", *EACH]  # whose servers are processes of their own


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.REPORT])
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("worker", [0, 2])
def test_a_synchronous_run_is_the_same_to_the_bit(worker: int, n: int, kind: Kind) -> None:
    cluster = doomed("sync", [(worker, kind, n)])
    trained(cluster, 8)
    assert [lost.worker for lost in cluster.left] == [worker]
    straight = make("sync", TASK)
    trained(straight, 8)
    assert same_bits(cluster.weights(), straight.weights())
    assert shares(cluster.log()) == shares(straight.log())
    assert counters(cluster)["committed"] == 8
    weights = worker_weights(cluster, 8)
    assert all((weights[0] == other).all() for other in weights[1:])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WAYS)
@seeds(2)
def test_whoever_dies_whenever_the_log_explains_the_weights(name: str, seed: int) -> None:
    rng = random.Random(seed)
    deaths = [
        (rng.randrange(3), rng.choice([Kind.PUSH, Kind.REPORT]), rng.randint(1, 9))
        for _ in range(rng.randint(1, 4))
    ]
    cluster = doomed(name, deaths, shuffle=seed)
    trained(cluster, 6)
    trained(cluster, 6)
    log = check(cluster, TASK)
    if name == "sync":
        assert cluster.left
        straight = make(name, TASK)
        trained(straight, 12)
        assert same_bits(cluster.weights(), straight.weights())
    if name != "backup" and name != "async-drop":  # whose leases may lie ahead of what is committed
        assert len(set(shares(log))) == len(shares(log))


class Endless:
    """Batches without end or number; whoever computes a step twice is one ahead of its steps."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        for number in count():
            self.drawn += 1
            yield tuple(column[number % 7 : number % 7 + 2] for column in samples(13))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.REPORT])
@pytest.mark.parametrize("n", [1, 4, 7])
def test_survivors_push_the_gradient_again_that_they_have(n: int, kind: Kind) -> None:
    """Nothing is drawn from a stream in vain, and no running mean is moved twice."""
    streams: list[Endless] = []

    def creator(worker: int, device: int) -> TorchModel:
        streams.append(Endless())
        task = replace(TASK, module=normalized, data=streams[-1])
        return task.creator()(worker, device)

    cluster = doomed("sync", [(1, kind, n)], creator=creator)
    trained(cluster, 8)
    assert [lost.worker for lost in cluster.left] == [1]
    for worker in (0, 2):
        state = replicas_of(cluster.workers[worker]).models[0].state()
        (tracked,) = [int(value) for key, value in state.items() if "tracked" in key]
        assert (tracked, streams[worker].drawn) == (8, 8)


def test_who_has_a_gradient_of_weights_that_were_replaced_meanwhile_computes_it_anew() -> None:
    def halved(cluster: InProcessCluster) -> Any:
        snapshot = cluster.snapshot("weights")
        snapshot.weights.view(torch.float64).mul_(0.5)
        return snapshot.version, snapshot.weights, None

    cluster = doomed("sync", [(1, Kind.PUSH, 5)])
    cluster.on_left = lambda worker: None  # nobody comes for now
    joined = cluster.coordinator.joined
    cluster.client.ask(9, True)
    cluster.network.run_until(lambda: len(joined) < 3, "its death")
    settle(cluster)
    version, other = cluster.coordinator.version, halved(cluster)
    with pytest.raises(PeerLostError, match="its successor has yet to join"):
        cluster.wait(cluster.client.install(*other), "the refusal")
    cluster.replace(1)
    cluster.network.run_until(lambda: len(joined) == 3, "its successor")
    assert cluster.coordinator.version == version
    cluster.wait(cluster.client.install(*other), "the installation")
    while not cluster.client.outcomes.empty():
        cluster.client.outcomes.get()
    trained(cluster, 3)
    straight = make("sync", TASK)
    trained(straight, version)
    straight.wait(straight.client.install(*halved(straight)), "the installation")
    trained(straight, 3)
    assert same_bits(cluster.weights(), straight.weights())


def test_a_step_that_failed_of_itself_is_computed_again() -> None:
    """Its weights may be others by then, or its model."""
    cluster = doomed("sync", [])
    trained(cluster, 2)
    computed: Counter[int] = Counter()
    for index, worker in enumerate(cluster.workers):
        original = replicas_of(worker).compute

        def counted(*arguments: Any, index: int = index, original: Any = original) -> Any:
            computed[index] += 1
            return original(*arguments)

        replicas_of(worker).compute = counted  # type: ignore[method-assign]
    pushes: list[Message] = []

    def hold(message: Message) -> list[Message]:
        if message.kind is Kind.PUSH and message.source == worker_peer(2):
            pushes.append(message)
            return []
        return [message]

    cluster.network.filter = hold
    cluster.client.ask(1, True)
    cluster.network.run_until(lambda: len(computed) == 3, "all gradients")
    cluster.wait(cluster.client.revoke(), "the coordinator")
    cluster.network.filter = lambda message: [message]
    trained(cluster, 1)
    assert computed == {0: 2, 1: 2, 2: 2}


def test_two_that_die_together_are_both_replaced() -> None:
    cluster = make("sync", TASK, replaces=True)
    trained(cluster, 3)
    cluster.kill(0)
    cluster.kill(2)
    trained(cluster, 3)
    assert sorted(lost.worker for lost in cluster.left) == [0, 2]
    straight = make("sync", TASK)
    trained(straight, 6)
    assert same_bits(cluster.weights(), straight.weights())


def test_one_that_dies_between_two_steps_is_told_of_when_the_next_one_is_asked_for() -> None:
    cluster = make("async", TASK, replaces=True)
    trained(cluster, 3)
    cluster.kill(1)
    trained(cluster, 3)
    assert [(lost.worker, lost.life, lost.why) for lost in cluster.left] == [(1, 0, "closed")]
    cluster.kill(1)
    trained(cluster, 3)
    assert cluster.left[-1].life == 1
    check(cluster, TASK)


def test_nobody_who_comes_is_waited_for_until_the_deadline_and_named() -> None:
    cluster = make("sync", TASK, replaces=True, step_timeout=50.0)
    cluster.on_left = lambda worker: None
    trained(cluster, 2)
    cluster.kill(1)
    result = cluster.step(1)[-1]
    assert isinstance(result, Failure)
    assert (result.reason, result.awaited) == (
        "deadline",
        [str(worker_peer(1))],
    )
    cluster.replace(1)
    trained(cluster, 2)


def test_without_successors_a_death_is_a_failure() -> None:
    cluster = make("sync", TASK)
    trained(cluster, 2)
    cluster.kill(1)
    result = cluster.step(1)[-1]
    assert (type(result), result.reason) == (Failure, "lost")


@pytest.mark.parametrize("name", ["allreduce", "replicated"])
def test_who_holds_what_others_need_has_no_successor(name: str) -> None:
    assert not make(name, TASK, replaces=True).job.workers_are_replaced
    assert MODES[name].name == "allreduce"


def test_a_successor_is_not_told_that_a_push_of_its_predecessor_was_its_own() -> None:
    cluster = make("async", TASK, replaces=True)
    told: list[int] = []

    def listen(message: Message) -> list[Message]:
        if message.kind is Kind.LEASE and message.target == worker_peer(1):
            told.append(message.body.committed)
        return [message]

    cluster.network.filter = listen
    trained(cluster, 3)
    assert max(told) > 0
    told.clear()
    cluster.kill(1)
    trained(cluster, 3)
    assert told[0] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["backup", *EACH])
def test_the_others_do_not_pause(name: str) -> None:
    cluster = make(name, TASK, replaces=True)
    cluster.on_left = lambda worker: None  # nobody comes for now
    trained(cluster, 2)
    generation = cluster.coordinator.generation
    cluster.kill(1)
    trained(cluster, 6)
    assert [lost.worker for lost in cluster.left] == [1]
    cluster.replace(1)
    trained(cluster, 6)
    assert cluster.coordinator.generation == generation
    log = check(cluster, TASK)
    lives = [
        {push.incarnation for c in log.commits for push in c.pushes if push.worker == w}
        for w in range(3)
    ]
    assert (
        lives == [{0}, {0, 1}, {0}] or name == "backup"
    )  # where somebody may be too late every time


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sync", "backup", *EACH])
def test_who_is_given_up_though_it_lives_counts_no_more(name: str) -> None:
    """As one whose network was cut: nobody sees its channels close, and all that it says comes late."""
    cluster = make(name, TASK, replaces=True)
    trained(cluster, 2)
    held: list[Message] = []

    def hold(message: Message) -> list[Message]:
        if message.source == worker_peer(1) and not getattr(message.body, "incarnation", 0):
            held.append(message)
            return []
        return [message]

    cluster.network.filter = hold
    cluster.client.ask(6, True)
    cluster.network.run_until(lambda: bool(held), "a push of worker 1")
    cluster.client.declare_lost(1, 0, "silent")
    cluster.network.run_until(
        lambda: cluster.client.outcomes.qsize() > 0, "the word that it is gone"
    )
    healed = list(cluster.links[worker_peer(1)])
    old = cluster.worker_routers[1]
    trained(cluster, 6)
    assert [lost.life for lost in cluster.left] == [0]
    cluster.network.filter = lambda message: [message]
    for message in held:  # the link heals
        for link in healed:
            if message.target in link.peers:
                link.send(message)
    cluster.network.run_until(
        lambda: cluster.coordinator.version == cluster.coordinator.limit, "all that was asked"
    )
    assert old is not cluster.worker_routers[1]
    while not cluster.client.outcomes.empty():
        cluster.client.outcomes.get()
    check(cluster, TASK)
    cluster.client.declare_lost(1, 0, "silent")  # of a life that is over: nothing happens
    trained(cluster, 2)
    assert len(cluster.left) == 1
