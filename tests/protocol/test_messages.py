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

from steepest.core.engine.client import Outcome, Position
from steepest.core.engine.exchange import PushPull
from steepest.core.engine.topology import HostMap, Topology
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import (
    COORDINATOR,
    Kind,
    Message,
    Peer,
    server_peer,
    worker_peer,
)
from steepest.core.messages.permissions import MessageCheck
from steepest.core.transport.router import Router
from steepest.testing import InProcessCluster, replay, server_peers
from tests.inside import buffers_of
from tests.modes import (
    EACH,
    GROUPED,
    MODES,
    PUSHED,
    Moody,
    check,
    counters,
    credit_kind,
    make,
    plus_one,
    settle,
    shares,
    staged_kind,
    trained,
    worker_weights,
)
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import Task, Weights, same_bits, sgd
from tests.said import body_of, said, with_fields

STEPS = 5
Filter = Callable[[Message], Sequence[Message]]

#: what a job that trains with servers sends in these tests, whatever its mode
EVERYWHERE = {
    *(Kind.PUSH, Kind.REPORT, Kind.COMMIT, Kind.WEIGHTS, Kind.JOIN, Kind.MEMBERS, Kind.FAILED),
    *(
        Kind.ASK,
        Kind.RESULT,
        Kind.FAILURE,
        Kind.REVOKE,
        Kind.REVOKED,
        Kind.READ_COUNTERS,
        Kind.COUNTERS,
    ),
    *(Kind.READ_LOG, Kind.LOG_PAGE, Kind.READ, Kind.SNAPSHOT, Kind.STATE, Kind.SNAPSHOT_END),
    *(Kind.PUT, Kind.PUT_RECEIVED, Kind.INSTALL, Kind.INSTALLED),
}


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


def live(
    name: str, shuffle: int, disturb: Filter | None = None, delay: Any = None
) -> InProcessCluster:
    """A job that trains, has a step fail on the way, and ends where it would have ended without; all checked.

    Steps are asked for in several goes; a worker joins once more.
    """
    trainee = task()
    cluster = make(name, trainee, shuffle=shuffle)
    network = cluster.network
    network.filter = disturb or network.filter
    network.latency = delay or network.latency
    cluster.workers[1].join()
    outcomes: list[Outcome] = []
    while left := STEPS - cluster.coordinator.version // cluster.job.versions_per_step:
        outcomes += cluster.step(min(left, 1 if not outcomes else 2))
        if isinstance(outcomes[-1], Failure):
            outcomes += revoked(cluster)
    kinds = Counter(type(outcome) for outcome in outcomes)
    assert kinds == {Result: STEPS, Failure: 1}
    log = check(cluster, trainee)
    committed = shares(log)
    assert counters(cluster)["committed"] == STEPS * cluster.job.versions_per_step
    plan = cluster.job.plan()
    assert plan is not None
    parts = cluster.job.shares
    sizes = [len(plan.share(share // parts, share % parts, parts)) for share in committed]
    assert sum(o.samples for o in outcomes if isinstance(o, Result)) == sum(sizes)
    if name != "backup":
        assert sorted(committed) == list(range(STEPS * 3))
    if name == "sync":
        assert same_bits(cluster.weights(), undisturbed())
    snapshot = cluster.snapshot("state")
    places = [(about["name"], about["key"], about["start"]) for _, about, _ in snapshot.records]
    assert len(places) == len(set(places)) > 4
    assert all(
        torch.equal(held, snapshot.weights) for held in worker_weights(cluster, snapshot.version)
    )
    for scale in (2, 3):
        weights = snapshot.weights.view(torch.float64) * scale
        cluster.wait(
            cluster.client.install(snapshot.version, weights.view(torch.uint8), None), "an install"
        )
        assert torch.equal(cluster.snapshot().weights.view(torch.float64), weights)
    trained(cluster, 1)
    settle(cluster)
    assert cluster.client.position == Position(
        cluster.coordinator.generation, cluster.coordinator.version
    )
    return cluster


def revoked(cluster: InProcessCluster) -> list[Outcome]:
    """Takes back what is granted still, as a driver does after a failure; what was heard of meanwhile.

    A backup worker may fail after the step was committed for which it was asked; that is heard of
    during the next one.
    """
    cluster.wait(cluster.client.revoke(), "the coordinator")
    found = []
    while not cluster.client.outcomes.empty():
        found.append(cluster.client.outcomes.get())
    return found


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
        self.count = 0

    def __call__(self, message: Message) -> list[Message]:
        old = self._old[message.source, message.target]
        again = [replace(m) for m in self._random.sample(old, min(self._count, len(old)))]
        self.count += len(again)
        self.generations |= {
            found for m in again if (found := generation_of(m)) < generation_of(message)
        }
        if message.kind in self._kinds:
            old.append(replace(message))
        return [*again, message] if self._random.random() < 0.5 else [message, *again]


KINDS = {
    "sync": sorted(EVERYWHERE | {staged_kind("sync"), credit_kind("sync")}),
    "copies": [Kind.LOGGED],  # where chunks have copies
    "backup": sorted(EVERYWHERE | {staged_kind("backup"), credit_kind("backup"), Kind.DISCARD}),
    "async-drop": sorted(
        EVERYWHERE | {staged_kind("async-drop"), credit_kind("async-drop"), Kind.DISCARD}
    ),
}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds]
)
@seeds(1)
def test_each_kind_of_message_may_come_twice(name: str, kind: Kind, seed: int) -> None:
    twice = Twice(kind)
    live(name, seed, twice)
    assert twice.seen > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_all_messages_may_come_twice(name: str, seed: int) -> None:
    live(name, seed, Twice(None))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Kind.READ, Kind.SNAPSHOT, Kind.WEIGHTS, Kind.SNAPSHOT_END])
@pytest.mark.parametrize("name", ["sync", "async"])
@seeds(1, "first")
def test_what_is_read_amid_training_is_one_version_though_messages_come_twice(
    name: str, kind: Kind, first: int
) -> None:
    trainee = task(None)
    amid = set()
    for seed in range(first, first + 50):
        if len(amid) > 1 and seed > first + 1:
            break
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
        if message.kind is Kind.DISCARD and message.body.readers:
            discarded.append(replace(message))
        return [message]

    cluster.network.filter = note
    trained(cluster, STEPS)
    old = discarded[0]
    server = cluster.servers[1]
    assert (old.target, old.body.generation) == (server_peer(1), server.generation)
    assert old.body.version < server.version
    sent = cluster.network.delivered
    server.handle(COORDINATOR, old)
    assert cluster.network.delivered == sent


def test_each_chunk_of_the_weights_only_ever_goes_forward() -> None:
    layout = make("async").job.description.layout
    weights = layout.allocate()
    topology = Topology(layout, [(0,)] * len(layout.chunks), HostMap.apart(1, 1))
    exchange = PushPull(0, topology, weights, lambda *_: None)
    first, second, *others = (chunk.index for chunk in layout.chunks)

    def arrive(generation: int, version: int, chunk: int) -> Any:
        value = torch.full_like(layout.chunk_view(weights, chunk), 10 * generation + version)
        place = {"generation": generation, "version": version, "chunk": chunk}
        message = said(Kind.WEIGHTS, value, **place)
        taken = exchange.destination(message, value.numel()) is not None
        arrived = exchange.receive(server_peer(0), message)
        return taken, arrived.complete, int(layout.chunk_view(weights, chunk)[0])

    assert arrive(1, 4, first) == (True, None, 14)
    assert arrive(2, 3, first) == (True, None, 23)
    assert arrive(1, 9, first) == (False, None, 23)
    assert arrive(2, 3, first) == (False, None, 23)
    assert arrive(1, 4, second) == (True, None, 14)
    assert arrive(2, 3, second) == (True, None, 23)
    *_, last = [arrive(2, 3, chunk) for chunk in others]
    assert last == (True, (2, 3), 23)
    assert arrive(2, 2, second) == (False, None, 23)


def stepping(name: str) -> set[Kind]:
    """What processes send each other in each step in that mode."""
    tensors = set[Kind]() if name in GROUPED else {Kind.PUSH, Kind.WEIGHTS}
    return tensors | {Kind.REPORT, Kind.ASK, Kind.COMMIT, staged_kind(name), credit_kind(name)}


#: by modes, what is sent in both generations
REPEATABLE = [
    (name, kind)
    for name in ("sync", "backup", "async", "ssp-0")
    for kind in [*sorted(stepping(name)), Kind.MEMBERS, Kind.RESULT]
]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "kind"), [*REPEATABLE, ("backup", Kind.DISCARD), ("async-drop", Kind.DISCARD)]
)
@seeds(1)
def test_messages_of_earlier_steps_and_generations_are_not_taken_again(
    name: str, kind: Kind, seed: int
) -> None:
    again = Again({kind}, seed)
    live(name, seed, again)
    assert again.count
    if kind in stepping(name) - {Kind.ASK}:
        assert again.generations


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_everything_may_come_again_at_any_time(name: str, seed: int) -> None:
    live(name, seed, Again(set(Kind), seed))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(2)
def test_messages_may_be_late(name: str, seed: int) -> None:
    rng = random.Random(seed)
    candidates = sorted(stepping(name) | {Kind.MEMBERS, Kind.DISCARD})
    kinds = set(rng.sample(candidates, rng.randint(1, len(candidates))))
    late, sent = Counter[Kind](), Counter[Kind]()

    def delay(message: Message) -> int:
        sent[message.kind] += 1
        if message.kind in kinds and (not late[message.kind] or rng.random() < 0.3):
            late[message.kind] += 1
            return rng.choice((1, 10, 100))
        return 0

    live(name, seed, delay=delay)
    assert late.keys() == kinds & sent.keys()
    assert sent.keys() >= stepping(name) | {Kind.MEMBERS}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["sync", "backup", "async-drop", "ssp-0"])
@pytest.mark.parametrize("kind", [Kind.WEIGHTS, "staged", Kind.COMMIT, Kind.PUSH])
@seeds(1)
def test_one_server_may_be_far_behind_the_other(name: str, kind: Kind | str, seed: int) -> None:
    far = server_peer(1)
    kind = kind if isinstance(kind, Kind) else staged_kind(name)
    live(name, seed, delay=lambda m: 60 if m.kind is kind and far in (m.source, m.target) else 0)


@pytest.mark.parametrize("name", PUSHED)
@seeds(1, "shuffle")
def test_the_chunks_of_a_push_may_come_in_any_order(name: str, shuffle: int) -> None:
    rng = random.Random(shuffle)
    kept: dict[Any, list[Message]] = defaultdict(list)
    moved = []

    def mix(message: Message) -> list[Message]:
        if message.kind is not Kind.PUSH:
            return [message]
        assert message.target is not None
        push = kept[message.source, message.target, message.body.generation, message.body.sequence]
        push.append(message)
        if len(push) < held[message.target.index]:
            return []
        order = rng.sample(push, len(push))
        while order == push and len(push) > 1:
            order = rng.sample(push, len(push))
        moved.append(order != push)
        return order

    held = Counter(server for servers in make(name).job.holders for server in servers)
    assert max(held.values()) > 1
    live(name, shuffle, mix)
    assert sum(moved) > 5


@pytest.mark.few(6)
@grid(lambda name, size: name != "backup" or size[0] > 1, name=MODES, size=[(1, 1), (2, 3), (3, 2)])
@seeds(1)
def test_plus_one_counts_every_update_once(name: str, size: tuple[int, int], seed: int) -> None:
    workers, servers = size
    cluster = make(name, plus_one(), workers, servers=servers, shuffle=seed)
    again = Again({Kind.PUSH, Kind.REPORT, staged_kind(name), Kind.COMMIT}, seed)
    twice = Twice(None)
    cluster.network.filter = lambda message: [copy for m in again(message) for copy in twice(m)]
    trained(cluster, 4)
    updates = 4 * workers if name in EACH else 4
    commits = cluster.log().commits
    assert len(commits) == updates
    rates = [1 / max(1, *commit.staleness) if name == "async-rate" else 1 for commit in commits]
    assert [commit.rate for commit in commits] == rates
    found = cluster.weights()["count"]
    assert torch.allclose(found, torch.full_like(found, sum(rates)), rtol=1e-14, atol=0)


def generation_of(message: Message) -> int:
    return getattr(message.body, "generation", 0)


def forged(message: Message, generation: int) -> Message:
    """The same of another generation, as of a later push."""
    fields = {"generation": generation}
    if hasattr(message.body, "sequence"):
        fields["sequence"] = message.body.sequence + 100
    return with_fields(message, **fields)


class Stranger:
    """A process that speaks for a worker who is no member, and which a larger job would have."""

    def __init__(self, cluster: InProcessCluster, index: int = 7) -> None:
        self.peer = worker_peer(index)
        self.router = cluster.network.router()
        self.send = self.router.sender(self.peer)
        self.router.host(self.peer, self)
        wider = cluster.job.limits._replace(workers=index + 1)
        for server, router in enumerate(cluster.server_routers):
            router.admit(MessageCheck(cluster.job.lines, wider))
            cluster.network.connect(self.router, (self.peer,), router, server_peers(server))
        self._cluster = cluster

    def say(self, kind: Kind, target: Peer, payload: Any = None, **fields: Any) -> None:
        coordinator, names = self._cluster.coordinator, body_of(kind).__struct_fields__
        place = {"generation": coordinator.generation, "pulled": coordinator.version}
        named = {**place, "version": coordinator.version, **fields}
        self.send(target, said(kind, payload, **{n: v for n, v in named.items() if n in names}))

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
    count = 0

    def interfere(message: Message) -> list[Message]:
        nonlocal count
        if message.kind is Kind.REPORT and message.source == worker_peer(1):
            if kind is Kind.PUSH:
                for chunk, owner in zip(chunks, cluster.job.owners, strict=True):
                    payload = torch.ones(chunk.nbytes // 8, dtype=torch.float64).view(torch.uint8)
                    about = {"sequence": count + 1, "chunk": chunk.index, "payload": payload}
                    stranger.say(kind, server_peer(owner), unit=1.0, total=1.0, **about)
                    count += 1
            else:
                sums = {"total": 1.0, "samples": 1, "bytes_pushed": 1, "bytes_pulled": 1}
                stranger.say(kind, COORDINATOR, sequence=count + 1, **sums)
                count += 1
        return [message]

    cluster.network.filter = interfere
    trained(cluster, 3)
    cluster.network.run_until(
        lambda: refused(cluster.server_routers) == count > 1, "all to be refused"
    )
    check(cluster, trainee)
    assert 7 not in {push.worker for commit in cluster.log().commits for push in commit.pushes}
    if name == "sync":
        assert same_bits(cluster.weights(), undisturbed())
    assert max(map(buffers_of, cluster.servers)) <= 4


@pytest.mark.few(4)
@pytest.mark.parametrize("name", PUSHED)
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
            return [forged(message, generation), message]
        if message.kind in (Kind.REPORT, staged_kind(name)):
            return [forged(message, generation), message]
        return [message]

    cluster.network.filter = forge
    trained(cluster, 3)
    network = cluster.network
    network.run_until(
        lambda: sum(server.refused for server in cluster.servers) >= sent > 0, "all to be refused"
    )
    assert sum(server.refused for server in cluster.servers) == sent
    trained(cluster, 1)
    check(cluster, trainee)
    if name == "sync":
        assert same_bits(cluster.weights(), undisturbed())
