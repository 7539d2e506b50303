"""Messages that come twice, late, in another order, again after long, or from strangers: every push counts once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steepest.client import Position
from steepest.comm.message import COORDINATOR, Kind, Message, Peer, server_peer, worker_peer
from steepest.comm.router import Router
from steepest.hosts import Hosts
from steepest.strategies.parameter_server import PushPull
from steepest.testing import InProcessCluster, replay, server_peers
from tests.modes import EACH, MODES, Moody, check, counters, make, plus_one, settle, shares, trained, worker_weights
from tests.reference import Task, Weights, same_bits, sgd

STEPS = 5
SEEDS = st.integers(0, 2**32)
few = settings(max_examples=4, deadline=None, database=None, derandomize=True)
Filter = Callable[[Message], Sequence[Message]]

#: what no job of workers sends of itself: somebody who is no member left; a user's collective operations
OPEN = {Kind.LEFT, Kind.DATA, Kind.ABORT}


class Trouble:
    """A mood that raises once: in one of the first steps of some worker."""

    def __init__(self, when: int | None) -> None:
        self._left = when

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._left = None
                raise ValueError("no luck today")
        return gradient


def task(raising: int | None = 8) -> Task:
    trouble = Trouble(raising)
    return Task(lambda: Moody(trouble), sgd(momentum=0.9))


@cache
def undisturbed() -> Weights:
    cluster = make("sync", task(None))
    trained(cluster, STEPS)
    return cluster.weights()


def live(name: str, shuffle: int, disturb: Filter | None = None, delay: Any = None) -> InProcessCluster:
    """A job that trains, has a step fail on the way, and ends where it would have ended without; all checked.

    Steps are asked for in several goes; a worker joins once more.
    """
    trainee = task()
    cluster = make(name, trainee, shuffle=shuffle)
    network = cluster.network
    network.filter = disturb or network.filter
    network.latency = delay or network.latency
    cluster.workers[1].join()
    outcomes: list[Message] = []
    while left := STEPS - cluster.coordinator.version // cluster.job.versions_per_step:
        outcomes += cluster.step(min(left, 1 if not outcomes else 2))
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert kinds == {Kind.RESULT: STEPS, Kind.FAILURE: 1}
    log = check(cluster, trainee)
    committed = shares(log)
    assert counters(cluster)["committed"] == STEPS * cluster.job.versions_per_step
    plan = cluster.job.plan()
    assert plan is not None
    parts = cluster.job.shares
    sizes = [len(plan.share(share // parts, share % parts, parts)) for share in committed]
    assert sum(o.values()["samples"] for o in outcomes if o.kind is Kind.RESULT) == sum(sizes)
    if name != "backup":
        assert sorted(committed) == list(range(STEPS * 3))
    if name == "sync":
        assert same_bits(cluster.weights(), undisturbed())
    snapshot = cluster.snapshot("state")
    places = [(about["name"], about["key"], about["start"]) for _, about, _ in snapshot.records]
    assert len(places) == len(set(places)) > 4
    assert all(torch.equal(held, snapshot.weights) for held in worker_weights(cluster, snapshot.version))
    for scale in (2, 3):
        weights = snapshot.weights.view(torch.float64) * scale
        cluster.wait(cluster.client.install(snapshot.version, weights.view(torch.uint8), None), "an install")
        assert torch.equal(cluster.snapshot().weights.view(torch.float64), weights)
    trained(cluster, 1)
    settle(cluster)
    assert cluster.client.position == Position(cluster.coordinator.generation, cluster.coordinator.version)
    return cluster


class Twice:
    """Has every message of a kind (None: of all) come twice."""

    def __init__(self, kind: Kind | None) -> None:
        self._kind = kind
        self.seen = 0

    def __call__(self, message: Message) -> list[Message]:
        if self._kind not in (None, message.kind):
            return [message]
        self.seen += 1
        return [message, replace(message)]


class Again:
    """Has messages of some kinds be followed, or preceded, by older ones of the same sender to the same receiver."""

    def __init__(self, kinds: set[Kind], seed: int, count: int = 2) -> None:
        self._kinds = kinds
        self._random = random.Random(seed)
        self._count = count
        self._old: dict[tuple[Peer | None, Peer | None], list[Message]] = defaultdict(list)
        self.generations: set[int] = set()

    def __call__(self, message: Message) -> list[Message]:
        old = self._old[message.source, message.target]
        again = [replace(m) for m in self._random.sample(old, min(self._count, len(old)))]
        self.generations |= {m.generation for m in again if m.generation < message.generation}
        if message.kind in self._kinds:
            old.append(replace(message))
        return [*again, message] if self._random.random() < 0.5 else [message, *again]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in OPEN])
@pytest.mark.parametrize("name", ["sync", "backup", "async-drop"])
def test_each_kind_of_message_may_come_twice(name: str, kind: Kind) -> None:
    twice = Twice(kind)
    live(name, int(kind), twice)
    unused = {Kind.DISCARD: name in ("sync", "copies"), Kind.LOGGED: name != "copies"}  # nothing is dropped; no copies
    assert twice.seen > 0 or unused.get(kind, False)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("shuffle", [1, 2])
def test_all_messages_may_come_twice(name: str, shuffle: int) -> None:
    live(name, shuffle, Twice(None))


@pytest.mark.parametrize("kind", [Kind.READ, Kind.SNAPSHOT, Kind.WEIGHTS, Kind.END])
@pytest.mark.parametrize("name", ["sync", "async"])
def test_what_is_read_amid_training_is_one_version_though_messages_come_twice(name: str, kind: Kind) -> None:
    trainee = task(None)
    amid = set()
    for seed in range(4):
        cluster = make(name, trainee, shuffle=seed)
        cluster.network.filter = Twice(kind)
        cluster.client.ask(STEPS, True)
        snapshots = []
        while cluster.coordinator.version < STEPS * cluster.job.versions_per_step:
            snapshots.append(cluster.snapshot())
        log = check(cluster, trainee)
        layout = cluster.job.description.layout
        amid |= {snapshot.version for snapshot in snapshots} - {0, len(log.commits)}
        for found in snapshots:
            part = replace(log, commits=log.commits[: found.version])
            assert same_bits(layout.named(found.weights), replay(part, trainee.creator()))
    assert len(amid) > 1


def test_a_server_does_not_act_on_a_decision_that_later_ones_followed() -> None:
    cluster = make("async-drop", task(None), shuffle=1)
    discarded: list[Message] = []

    def note(message: Message) -> list[Message]:
        if message.kind is Kind.DISCARD and message.values()["readers"]:
            discarded.append(replace(message))
        return [message]

    cluster.network.filter = note
    trained(cluster, STEPS)
    old = discarded[0]
    server = cluster.servers[1]
    assert (old.target, old.generation) == (server_peer(1), server.generation)
    assert old.version < server.version
    sent = cluster.network.delivered
    server.handle(COORDINATOR, old)
    assert cluster.network.delivered == sent


def test_each_chunk_of_the_weights_only_ever_goes_forward() -> None:
    layout = make("async").job.description.layout
    weights = layout.allocate()
    exchange = PushPull(0, layout, [(0,)] * len(layout.chunks), weights, lambda *_: None, Hosts.apart(1, 1))
    first, second, *others = (chunk.index for chunk in layout.chunks)

    def arrive(generation: int, version: int, chunk: int) -> Any:
        value = torch.full_like(layout.chunk_view(weights, chunk), 10 * generation + version)
        message = Message(Kind.WEIGHTS, generation, version=version, chunk=chunk, payload=value)
        taken = exchange.destination(message, value.numel()) is not None
        complete = exchange.receive(server_peer(0), message)
        return taken, complete, int(layout.chunk_view(weights, chunk)[0])

    assert arrive(1, 4, first) == (True, None, 14)
    assert arrive(2, 3, first) == (True, None, 23)
    assert arrive(1, 9, first) == (False, None, 23)
    assert arrive(2, 3, first) == (False, None, 23)
    assert arrive(1, 4, second) == (True, None, 14)
    assert arrive(2, 3, second) == (True, None, 23)
    *_, last = [arrive(2, 3, chunk) for chunk in others]
    assert last == (True, (2, 3), 23)
    assert arrive(2, 2, second) == (False, None, 23)


STEPPING = {Kind.PUSH, Kind.REPORT, Kind.ASK, Kind.COMMIT, Kind.WEIGHTS, Kind.STAGED, Kind.GRANT}


@pytest.mark.parametrize("kind", [*sorted(STEPPING), Kind.MEMBERS, Kind.DISCARD, Kind.RESULT, Kind.FAILED])
@pytest.mark.parametrize("name", ["sync", "backup", "async", "ssp-0"])
def test_messages_of_earlier_steps_and_generations_are_not_taken_again(name: str, kind: Kind) -> None:
    again = Again({kind}, int(kind))
    live(name, int(kind), again)
    if kind in STEPPING - {Kind.ASK}:
        assert again.generations


@pytest.mark.parametrize("name", MODES)
@few
@given(seed=SEEDS)
def test_everything_may_come_again_at_any_time(name: str, seed: int) -> None:
    live(name, seed, Again(set(Kind), seed))


@pytest.mark.parametrize("name", MODES)
@few
@given(seed=SEEDS, kinds=st.sets(st.sampled_from(sorted(STEPPING | {Kind.MEMBERS, Kind.DISCARD})), min_size=1))
def test_messages_may_be_late(name: str, seed: int, kinds: set[Kind]) -> None:
    rng = random.Random(seed)
    late: list[Message] = []

    def delay(message: Message) -> int:
        if message.kind in kinds and rng.random() < 0.3:
            late.append(message)
            return rng.choice((1, 10, 100))
        return 0

    live(name, seed, delay=delay)
    assert late or kinds <= {Kind.DISCARD, Kind.ASK, Kind.MEMBERS}


@pytest.mark.parametrize("name", ["sync", "backup", "async-drop", "ssp-0"])
@pytest.mark.parametrize("kind", [Kind.WEIGHTS, Kind.STAGED, Kind.COMMIT, Kind.PUSH])
def test_one_server_may_be_far_behind_the_other(name: str, kind: Kind) -> None:
    far = server_peer(1)
    live(name, 4, delay=lambda m: 60 if m.kind is kind and far in (m.source, m.target) else 0)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("shuffle", [1, 2])
def test_the_chunks_of_a_push_may_come_in_any_order(name: str, shuffle: int) -> None:
    rng = random.Random(shuffle)
    kept: dict[Any, list[Message]] = defaultdict(list)
    moved = []

    def mix(message: Message) -> list[Message]:
        if message.kind is not Kind.PUSH:
            return [message]
        assert message.target is not None
        push = kept[message.source, message.target, message.generation, message.sequence]
        push.append(message)
        if len(push) < held[message.target.index]:
            return []
        order = rng.sample(push, len(push))
        moved.append(order != push)
        return order

    held = Counter(server for servers in make(name).job.holders for server in servers)
    assert max(held.values()) > 1
    live(name, shuffle, mix)
    assert sum(moved) > 5


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (3, 2)])
@settings(few, max_examples=2)
@given(seed=SEEDS)
def test_plus_one_counts_every_update_once(name: str, workers: int, servers: int, seed: int) -> None:
    if name == "backup" and workers == 1:
        return
    cluster = make(name, plus_one(), workers, servers=servers, shuffle=seed)
    again = Again({Kind.PUSH, Kind.REPORT, Kind.STAGED, Kind.COMMIT}, seed)
    twice = Twice(None)
    cluster.network.filter = lambda message: [copy for m in again(message) for copy in twice(m)]
    trained(cluster, 4)
    updates = 4 * workers if name in EACH else 4
    rates = sum(commit.rate for commit in cluster.log().commits)
    assert rates == updates or name == "async-rate"
    found = cluster.weights()["count"]
    assert torch.allclose(found, torch.full_like(found, rates), rtol=1e-14, atol=0)
    assert name == "async-rate" or bool((found == updates).all())


class Stranger:
    """A process that speaks for a worker who is no member."""

    def __init__(self, cluster: InProcessCluster, index: int = 7) -> None:
        self.peer = worker_peer(index)
        self.router = cluster.network.router()
        self.send = self.router.sender(self.peer)
        self.router.host(self.peer, self)
        for server, router in enumerate(cluster.server_routers):
            cluster.network.connect(self.router, (self.peer,), router, server_peers(server))
        self._cluster = cluster

    def say(self, kind: Kind, target: Peer, **fields: Any) -> None:
        generation = self._cluster.coordinator.generation
        self.send(target, Message(kind, generation, version=self._cluster.coordinator.version, **fields))

    def destination(self, message: Message, size: int) -> None: ...

    def handle(self, source: Peer, message: Message) -> None: ...

    def lost(self, peer: Peer, reason: str) -> None: ...

    def tick(self, now: float) -> None: ...


def refused(routers: Sequence[Router]) -> int:
    return sum(router.refused for router in routers)


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.REPORT, Kind.FAILED, Kind.JOIN])
@pytest.mark.parametrize("name", ["sync", "backup", "async", "ssp-2"])
def test_who_is_no_member_is_refused_and_counted(name: str, kind: Kind) -> None:
    trainee = task(None)
    cluster = make(name, trainee)
    trained(cluster, 2)
    stranger = Stranger(cluster)
    chunks = cluster.job.description.layout.chunks
    said = 0

    def interfere(message: Message) -> list[Message]:
        nonlocal said
        if message.kind is Kind.REPORT and message.source == worker_peer(1):
            if kind is Kind.PUSH:
                for chunk, owner in zip(chunks, cluster.job.owners, strict=True):
                    payload = torch.ones(chunk.nbytes // 8, dtype=torch.float64).view(torch.uint8)
                    about = {"sequence": said + 1, "chunk": chunk.index, "payload": payload}
                    stranger.say(kind, server_peer(owner), weight=1.0, total=1.0, **about)
                    said += 1
            else:
                meta = {
                    "samples": 1,
                    "bytes": 1,
                    "pulled": 1,
                    "loss": 0.0,
                    "metrics": {},
                    "timings": {},
                    "error": "",
                    "traceback": "",
                }
                stranger.say(kind, COORDINATOR, sequence=said + 1, total=1.0, meta=meta)
                said += 1
        return [message]

    cluster.network.filter = interfere
    trained(cluster, 3)
    cluster.network.run_until(lambda: refused(cluster.server_routers) == said > 1, "all to be refused")
    check(cluster, trainee)
    assert 7 not in {push.worker for commit in cluster.log().commits for push in commit.pushes}
    if name == "sync":
        assert same_bits(cluster.weights(), undisturbed())
    held = [chunk for server in cluster.servers for chunk in server._trainable]
    assert max(len(chunk._buffers) for chunk in held) <= 4


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("generation", [0, 1])
def test_pushes_of_a_foreign_generation_are_refused_and_counted(name: str, generation: int) -> None:
    trainee = task(None)
    cluster = make(name, trainee)
    trained(cluster, 1)
    cluster.wait(cluster.client.revoke(), "a new generation")
    assert cluster.coordinator.generation == 2
    sent = 0

    def forge(message: Message) -> list[Message]:
        nonlocal sent
        if message.kind is Kind.PUSH:
            sent += 1
            return [replace(message, generation=generation, sequence=message.sequence + 100), message]
        if message.kind in (Kind.REPORT, Kind.STAGED):
            return [replace(message, generation=generation, sequence=message.sequence + 100), message]
        return [message]

    cluster.network.filter = forge
    trained(cluster, 3)
    network = cluster.network
    network.run_until(lambda: sum(server.refused for server in cluster.servers) >= sent > 0, "all to be refused")
    assert sum(server.refused for server in cluster.servers) == sent
    trained(cluster, 1)
    check(cluster, trainee)
    if name == "sync":
        assert same_bits(cluster.weights(), undisturbed())
