"""What several workers of a host share: gradients that leave added up, weights that arrive once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn

from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import (
    Kind,
    Message,
    Peer,
    PushId,
    aggregator_peer,
    server_peer,
    worker_peer,
)
from steepest.errors import ProtocolError
from steepest.strategies.aggregation.host_aggregator import HostAggregator
from steepest.testing import InProcessCluster
from tests.group_in_one_thread import twice
from tests.inside import replicas_of
from tests.modes import Moody, check, make, settle, trainable, trained
from tests.random_examples import seeds
from tests.reference import Task, difference, perceptron, same_bits, samples, sgd
from tests.said import said

FLOAT64 = Task(optimizer=sgd(momentum=0.9))
FLOAT32 = Task(
    lambda: perceptron(torch.float32), sgd(momentum=0.9), samples(13, dtype=torch.float32)
)
#: workers' hosts, servers' hosts
PLACES = {
    "one host": ((0, 0), (0,)),
    "three on a host": ((0, 0, 0), (0,)),
    "two servers on it": ((0, 0), (0, 0)),
    "two and one": ((0, 0, 1), (0, 1)),
    "one and two": ((0, 1, 1), (0, 1)),
    "two and two": ((0, 1, 0, 1), (0, 1)),
    "two and two, three servers": ((0, 0, 1, 1), (1, 0, 1)),
    "a host without a server": ((0, 0, 1, 1), (0,)),
    "servers elsewhere": ((0, 0), (1, 2)),
    "two and one, and a host without workers": ((0, 0, 1), (0, 1, 2)),
}
EVERYWHERE = pytest.mark.parametrize("places", PLACES)


def hosted(places: str, task: Task = FLOAT64, **options: object) -> InProcessCluster:
    workers, servers = PLACES[places]
    hosts = HostMap(workers, servers, gathers=True)
    return make("sync", task, len(workers), servers=len(servers), hosts=hosts, **options)


@pytest.mark.few(2)
@EVERYWHERE
@pytest.mark.parametrize("devices", [1, 2])
def test_training_equals_serial_training_and_its_replay(places: str, devices: int) -> None:
    cluster = hosted(places, devices=devices)
    trained(cluster, 12)
    check(cluster, FLOAT64)
    assert difference(cluster.weights(), FLOAT64.train(len(cluster.workers) * devices, 12)) < 1e-12


@pytest.mark.long
@pytest.mark.few(2)
@EVERYWHERE
@seeds(1)
def test_messages_that_overtake_each_other_and_come_twice_change_nothing(
    places: str, seed: int
) -> None:
    cluster = hosted(places, shuffle=seed)
    cluster.network.filter = twice
    trained(cluster, 12)
    plain = hosted(places)
    trained(plain, 12)
    assert same_bits(cluster.weights(), plain.weights())
    check(cluster, FLOAT64)


@pytest.mark.few(2)
@EVERYWHERE
@pytest.mark.parametrize("wire", ["fp16", ("bf16", None), (None, "fp16")])
def test_half_precision_is_for_what_crosses_between_hosts(places: str, wire: object) -> None:
    cluster = hosted(places, FLOAT32, settings={"wire_dtype": wire})
    trained(cluster, 10)
    check(cluster, FLOAT32)
    workers, servers = PLACES[places]
    exact = difference(cluster.weights(), FLOAT32.train(len(workers), 10)) < 1e-6
    assert exact == (len({*workers}) == 1 and {*servers} == {0})


def test_a_host_sends_its_gradient_and_is_sent_the_weights_once() -> None:
    """With two hosts of two workers each: half of what workers push by themselves crosses, and no more."""
    cluster = hosted("two and two")
    places, size = cluster.job.places, Counter[tuple[str, str]]()

    def look(message: Message) -> list[Message]:
        assert message.source is not None
        assert message.target is not None
        here, there = places.host_of(message.source), places.host_of(message.target)
        if (
            message.kind in (Kind.PUSH, Kind.HOST_PUSH, Kind.WEIGHTS)
            and None not in (here, there)
            and here != there
        ):
            assert message.payload is not None
            size[message.source.role, message.target.role] += message.payload.nbytes
        return [message]

    trained(cluster, 1)
    cluster.network.filter = look
    trained(cluster, 5)
    layout = cluster.job.description.layout
    bytes_of = [
        sum(layout.chunks[c].nbytes for c, o in enumerate(cluster.job.owners) if o == s)
        for s in (0, 1)
    ]
    assert size == {
        ("aggregator", "server"): 5 * sum(bytes_of),
        ("server", "aggregator"): 5 * sum(bytes_of),
    }


@EVERYWHERE
def test_workers_with_a_relay_compute_on_the_vector_that_its_server_updates(places: str) -> None:
    cluster = hosted(places)
    trained(cluster, 2)
    for aggregator, workers in cluster.job.places.aggregators.items():
        vectors = {
            id(replicas_of(cluster.workers[worker]).weights.untyped_storage()) for worker in workers
        }
        addresses = {replicas_of(cluster.workers[worker]).weights.data_ptr() for worker in workers}
        assert len(addresses) == 1, vectors
        held = trainable(cluster.servers[aggregator])[0]
        shared = next(replicas_of(cluster.workers[worker]).weights for worker in workers)
        assert held.weights.data_ptr() == shared.data_ptr() + held.chunk.start
        module = replicas_of(cluster.workers[workers[0]]).models[0].module
        begin, end = shared.data_ptr(), shared.data_ptr() + shared.numel()
        assert all(begin <= parameter.data_ptr() < end for parameter in module.parameters())


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1)])
def test_members_of_an_allreduce_stay_with_the_vectors_that_their_servers_update(
    hosts: tuple[int, ...],
) -> None:
    """Between processes an aggregator's vector is not theirs to write to: what comes later would be forgotten."""
    cluster = make("allreduce", FLOAT64, len(hosts), hosts=HostMap(hosts, hosts, gathers=True))
    assert cluster.job.places.aggregators
    trained(cluster, 3)
    settle(cluster)
    for worker, server in zip(cluster.workers, cluster.servers, strict=True):
        own = replicas_of(worker).weights
        for held in trainable(server):
            assert held.weights.data_ptr() == own.data_ptr() + held.chunk.start
        assert same_bits(replicas_of(worker).layout.named(own), cluster.weights())
    check(cluster, FLOAT64)


@EVERYWHERE
def test_a_snapshot_does_not_change_with_the_steps_that_follow(places: str) -> None:
    cluster = hosted(places)
    trained(cluster, 1)
    snapshot = cluster.snapshot()
    before = snapshot.weights.clone()
    trained(cluster, 3)
    assert torch.equal(snapshot.weights, before)


@EVERYWHERE
def test_new_weights_reach_every_worker(places: str) -> None:
    cluster = hosted(places)
    trained(cluster, 3)
    wanted = torch.full(
        (cluster.job.description.layout.nbytes // 8,), 0.25, dtype=torch.float64
    ).view(torch.uint8)
    cluster.wait(cluster.client.install(3, wanted, None), "new weights")
    settle(cluster)
    for worker in cluster.workers:
        named = cluster.job.description.layout.named(replicas_of(worker).weights)
        assert all(bool((value == 0.25).all()) for value in named.values())


@pytest.mark.few(10)
@EVERYWHERE
@pytest.mark.parametrize("culprit", [0, 1])
def test_nan_is_refused_with_the_name_of_who_made_it(places: str, culprit: int) -> None:
    bad = [False]

    def module(worker: int) -> nn.Module:
        return Moody(
            lambda gradient: gradient * float("nan") if bad[0] and worker == culprit else gradient
        )

    made: list[int] = []

    def next_module() -> nn.Module:
        made.append(0)
        return module(len(made) - 1)

    task = dataclasses.replace(FLOAT64, module=next_module)
    cluster = hosted(places, task)
    trained(cluster, 1)
    before = cluster.weights()
    bad[0] = True
    result = cluster.step(1)[-1]
    assert isinstance(result, Failure)
    assert {worker for worker, _ in result.culprits} == {culprit}
    assert same_bits(cluster.weights(), before)
    bad[0] = False
    trained(cluster, 3)  # the step is taken again, from the same weights


@pytest.mark.few(3)
@EVERYWHERE
@seeds(1)
def test_a_step_that_was_given_up_is_taken_again(places: str, seed: int) -> None:
    """Gradients of the first attempt that were added up already do not count."""
    calls = [0]

    def mood(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] in (5, 11):
            raise RuntimeError("moody")
        return gradient

    torch.manual_seed(0)
    task = dataclasses.replace(FLOAT64, module=lambda: Moody(mood))
    cluster = hosted(places, task, shuffle=seed)
    taken = 0
    while taken < 8:
        taken += isinstance(cluster.step(1)[-1], Result)
    calm = dataclasses.replace(FLOAT64, module=lambda: Moody(lambda gradient: gradient))
    assert difference(cluster.weights(), calm.train(len(cluster.workers), 8)) < 1e-12


def test_parameters_without_gradients_and_empty_shares_pass_through_a_relay() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(3, 2).double()
            self.unused = nn.Linear(3, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    task = Task(Forked, sgd(momentum=0.9, weight_decay=0.1), samples(13))
    cluster = hosted(
        "two and two", task
    )  # 13 samples: the last step of an epoch has some for one worker only
    trained(cluster, 14)
    check(cluster, task)
    expected = task.train(4, 14)
    assert difference(cluster.weights(), expected) < 1e-12
    torch.manual_seed(0)
    assert torch.equal(cluster.weights()["unused.weight"], Forked().unused.weight)


def test_a_relay_refuses_what_is_not_of_its_host() -> None:
    cluster = hosted("two and one")
    layout = cluster.job.description.layout
    sent: list[tuple[Peer, Message]] = []
    aggregator = HostAggregator(
        0, cluster.job.topology, layout.allocate(), lambda *what: sent.append(what)
    )
    with pytest.raises(ProtocolError, match="not of the host"):
        aggregator.handle(worker_peer(2), said(Kind.PUSH, unit=1.0))
    with pytest.raises(ProtocolError, match="no such size"):
        aggregator.destination(said(Kind.PUSH), 3)
    with pytest.raises(ProtocolError, match="takes no"):
        aggregator.destination(said(Kind.STATE), 8)
    assert not sent
    trained(cluster, 1)
    generation, chunk = cluster.coordinator.generation, cluster.job.owners.index(0)
    named = {"generation": generation, "pulled": 1, "chunk": chunk}
    pushes = said(Kind.HOST_PUSH, **named, pushes=(PushId(2, 0, 1),))
    with pytest.raises(ProtocolError, match="serves"):
        cluster.servers[0].handle(aggregator_peer(0), pushes)


def test_hosts_say_who_has_a_relay() -> None:
    hosts = HostMap((0, 0, 1, 2, 2), (1, 0, 0), gathers=True)
    assert hosts.aggregators == {1: (0, 1)}
    assert [hosts.aggregator_of(worker) for worker in range(5)] == [1, 1, None, None, None]
    assert [hosts.reader_of(worker) for worker in (0, 2)] == [aggregator_peer(1), worker_peer(2)]
    peers = (worker_peer(3), server_peer(2), aggregator_peer(1), Peer("client", 0))
    assert [hosts.host_of(peer) for peer in peers] == [2, 0, 0, None]
    assert not dataclasses.replace(hosts, gathers=False).aggregators
    apart = HostMap.apart(2, 2)
    assert not any(apart.beside(worker, server) for worker in range(2) for server in range(2))
    assert all(a != b for a, b in pairwise((*apart.workers, *apart.servers)))


def test_nan_of_the_only_one_that_weighs_anything_is_refused_with_its_name() -> None:
    """Worker 0 has padding only; whose gradient it is must not be told by who comes first on the host."""
    bad = [False]

    def mood(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if bad[0] else gradient

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        return nn.functional.mse_loss(output, target), float((target < 1e6).all())

    x, y = samples(16)
    task = Task(lambda: Moody(mood), sgd(), (x, y), loss)
    plan = hosted("two and two", task).job.plan()
    assert plan is not None
    y[plan.share(1, 0, 4)] = 1e9
    y[plan.share(1, 1, 4)] = 1e9
    y[plan.share(1, 3, 4)] = 1e9
    cluster = hosted("two and two", task)
    trained(cluster, 1)
    bad[0] = True
    result = cluster.step(1)[-1]
    assert {worker for worker, _ in result.culprits} == {2}
