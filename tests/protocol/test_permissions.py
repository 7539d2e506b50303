"""Who may say what: the table, what it refuses, and that nothing which real runs say is refused."""

from __future__ import annotations

import itertools
import re
import tracemalloc
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec
import pytest
import torch
from msgspec.msgpack import Ext

from steepest import DistributedSGD
from steepest.core.config.compression import TopK
from steepest.core.engine.server import Server
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Result
from steepest.core.messages.fields import Limits
from steepest.core.messages.gradients import Push
from steepest.core.messages.message import (
    COORDINATOR,
    ROLES,
    Kind,
    Message,
    Peer,
    PushId,
    member_peer,
    server_peer,
    worker_peer,
)
from steepest.core.messages.permissions import TRAINING, MessageCheck
from steepest.core.messages.schema import MAX_BODY
from steepest.core.messages.users import OPEN
from steepest.core.strategies.strategy import Strategy
from steepest.core.transport.router import Router
from steepest.errors import ConfigurationError, ProtocolError
from steepest.strategies.collectives.members import MemberCollective
from steepest.strategies.collectives.messages import MEMBERS, MemberKind
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.tables.job.row_messages import LINES
from steepest.testing import Fault, InProcessCluster
from tests.fuzzing import carried
from tests.group_in_one_thread import GroupInOneThread, like
from tests.modes import MODES, make, mode, trained
from tests.reference import Task, difference, perceptron, same_bits, samples, sgd
from tests.said import body_of, with_fields
from tests.said import said as said_of
from tests.simulation.run import Simulation, run_config

# -- the table ---------------------------------------------------------------------------------------

#: what changes what servers hold, and for whom
DECISIONS = (
    *(Kind.COMMIT, Kind.DISCARD, Kind.REFRESH, Kind.MEMBERS, Kind.WORKER_JOINED, Kind.WORKER_ENDED),
    *(Kind.SNAPSHOT, Kind.INSTALL_PUT),
)


def servers_take(table: Any) -> set[tuple[Kind, str]]:
    return {(kind, source) for kind, source, target in table if target == "server"}


def test_only_the_coordinator_decides_what_servers_do() -> None:
    for table in (TRAINING, OPEN, MEMBERS, LINES):
        for kind in DECISIONS:
            assert {source for k, source in servers_take(table) if k is kind} <= {"coordinator"}


def test_a_parameter_servers_users_can_neither_end_steps_nor_begin_generations() -> None:
    assert not {(kind, source) for kind, source, _ in OPEN} & {
        (kind, source)
        for kind in (
            *(
                Kind.ASK,
                Kind.REVOKE,
                Kind.STOP,
                Kind.FAILED,
                Kind.JOIN,
                Kind.GRANT,
                Kind.LEASE,
                Kind.GIVE_UP,
            ),
            *(Kind.USER_LEFT, Kind.LOGGED),
        )
        for source in ("worker", "client")
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("table", [TRAINING, OPEN, MEMBERS, LINES])
def test_what_is_not_in_the_table_is_refused(table: Any) -> None:
    admission = MessageCheck(table)
    for kind, source, target in itertools.product(Kind, ROLES, ROLES):
        message = Message(kind, b"", None, Peer(source, 0), Peer(target, 0))
        if (kind, source, target) not in table:
            with pytest.raises(
                ProtocolError, match=f"a {source} may not send {kind.name} to a {target}"
            ):
                admission.check(message)


@pytest.mark.parametrize(
    ("field", "value", "kind", "source", "target"),
    [
        ("version", -1, Kind.WEIGHTS, server_peer(0), worker_peer(0)),
        ("version", 2**63 - 1, Kind.LOGGED, server_peer(0), COORDINATOR),
        ("chunk", -1, Kind.PUSH, worker_peer(0), server_peer(0)),
        ("chunk", 4, Kind.PUT, Peer("client", 0), server_peer(0)),
        ("unit", -1.0, Kind.PUSH, worker_peer(0), server_peer(0)),
        ("total", 1e200, Kind.PUSH, worker_peer(0), server_peer(0)),
        *(
            ("rate", value, Kind.COMMIT, COORDINATOR, server_peer(0))
            for value in (float("nan"), float("inf"), -1.0)
        ),
    ],
)
def test_what_is_wrong_in_a_place_or_weight_is_named(
    field: str, value: Any, kind: Kind, source: Peer, target: Peer
) -> None:
    admission = MessageCheck(limits=Limits(chunks=4))
    admission.check(arrived(said_as(kind, source, target)))
    with pytest.raises(ProtocolError, match=f"{kind.name} from {source} with {field}=.*: give"):
        admission.check(arrived(said_as(kind, source, target, **{field: value})))


def said_as(kind: Kind, source: Peer, target: Peer, **fields: Any) -> Message:
    return said_of(kind, None, source, target, **fields)


def arrived(message: Message) -> Message:
    """A message as it comes to another process."""
    found = carried(message)
    assert found is not None
    return found


@pytest.mark.parametrize("depth", [1, 500, 1000, 100_000])
def test_a_value_within_many_lists_is_refused_as_any_other(depth: int) -> None:
    body = b"\x93\x01\x02" + b"\x91" * depth + b"\x01"
    message = Message(Kind.LEASE, body, None, COORDINATOR, worker_peer(0))
    with pytest.raises(ProtocolError, match=r"LEASE from coordinator with share=.*: give `int`"):
        MessageCheck().check(message)


def test_a_plain_value_within_too_many_lists_is_refused() -> None:
    state = b"\x94\x07\x02\xc2\x81\xa8schedule\x81\xa1a" + b"\x91" * 100_000 + b"\x01"
    message = Message(Kind.INSTALL, state, None, Peer("client", 0), COORDINATOR)
    with pytest.raises(ProtocolError, match="INSTALL from client 0 with damaged fields: maximum"):
        MessageCheck().check(message)


REPORT = {
    "samples": 1,
    "bytes_pushed": 2,
    "bytes_pulled": 3,
    "loss": 0.5,
    "metrics": {"a": 1.0},
    "timings": {"compute": 0.1},
}
COMMIT = {
    "pushes": [[0, 0, 1]],
    "readers": [[0, 0]],
    "hyper": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    "clip": 0.5,
}
WRONG = {
    Kind.REPORT: [
        *(("samples", value) for value in (None, -1, 1.5, True, "1", 2**63, float("nan"))),
        ("metrics", {"a": "b"}),
        ("metrics", [1.0]),
        ("metrics", {1: 1.0}),
        ("timings", {"compute": {}}),
        ("loss", True),
        ("loss", b"1"),
        *(("notes", value) for value in ({}, [1], [[0, 1.0]], [[-1, 1.0, {}]], [[0, 1.0, {"a": "b"}]])),
    ],
    Kind.COMMIT: [
        *(("pushes", value) for value in (None, 3, "xyz", [0, 0, 1], [[0, 0]], [[0, 0, 1, 2]])),
        *(("pushes", value) for value in ([[9, 0, 1]], [[[0], 0, 1]])),
        *(("readers", value) for value in ([[0]], [["0", 0]], [[-1, 0]])),
        *(("hyper", value) for value in ({}, [1], [{"lr": {}}], [{"lr": [["x"]]}], [{"lr": b"x"}])),
        ("skip", 1),
        ("clip", "1"),
        *(("entry", [value]) for value in (b"x", datetime.now(timezone.utc), Ext(5, b"x"), [{1: 2}])),
        *(("state", value) for value in ({"ledger": []}, {"history": 1}, {"schedule": {"a": b"x"}})),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "field", "value"), [(kind, *case) for kind, cases in WRONG.items() for case in cases]
)
def test_what_is_wrong_in_a_field_is_named(kind: Kind, field: str, value: Any) -> None:
    valid, source, target = (
        (REPORT, worker_peer(0), COORDINATOR)
        if kind is Kind.REPORT
        else (COMMIT, COORDINATOR, server_peer(0))
    )
    cluster = make("sync")
    admission = cluster.server_routers[0].admission
    admission.check(arrived(said_as(kind, source, target, **valid)))
    with pytest.raises(ProtocolError, match=f"{kind.name} from {source} with {field}=.*: give"):
        admission.check(arrived(said_as(kind, source, target, **{**valid, field: value})))


def test_too_few_or_too_many_fields_are_refused() -> None:
    whole = list(msgspec.to_builtins(said_of(Kind.PUSH).body))
    for fields, why in (
        (whole[:4], "at least length 5, got 4"),
        ([*whole, 1], "at most length 8, got 9"),
    ):
        message = Message(Kind.PUSH, fields, None, worker_peer(0), server_peer(0))
        with pytest.raises(ProtocolError, match=f"PUSH from worker 0 with damaged fields: .*{why}"):
            MessageCheck().check(arrived(message))


BAD_BODIES = {
    "empty": b"",
    "cut off": b"\x93\x01",
    "no code": b"\xc1",
    "not UTF-8": b"\x92\x01\xa2\xff\xfe",
    "two values": b"\x90\x90",
    "map": b"\x80",
    "null": b"\xc0",
    "number": b"\x07",
    "string": b"\xa1x",
    "deep lists": b"\x91" * 1_000_000,
    "deep maps": b"\x81\xa1a" * 500_000,
    "endless list": b"\xdd\xff\xff\xff\xff",
    "endless map": b"\xdf\xff\xff\xff\xff",
    "time": b"\xd6\xff\x00\x00\x00\x01",
    "zeros": b"\0" * 40,
}


@pytest.mark.parametrize("line", [*{**TRAINING, **MEMBERS, **LINES}])
def test_bodies_that_are_damaged_or_deep_are_refused(line: Any) -> None:
    kind, source, target = line
    admission = MessageCheck({**TRAINING, **MEMBERS, **LINES})
    for data in BAD_BODIES.values():
        message = Message(kind, data, None, Peer(source, 0), Peer(target, 0))
        with pytest.raises(ProtocolError, match=f"{kind.name} from"):
            admission.check(message)
        assert admission.number(message) == 0


@pytest.mark.parametrize("empty", [b"\x90", b"\x80"])
def test_a_body_of_nothing_but_lists_takes_little_memory(empty: bytes) -> None:
    """Each of a byte would take 64."""
    count = MAX_BODY - 20
    body = b"\x92\x01\xdd" + count.to_bytes(4, "big") + empty * count
    message = Message(Kind.LOG_PAGE, body, None, COORDINATOR, Peer("client", 0))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="more than 524288 lists and maps"):
            MessageCheck().check(message)
        assert MessageCheck().number(message) == 0
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


# -- what real runs say ------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """All messages from here on, those between roles of one process included; each was looked at as it left."""
    found: list[Message] = []
    original = Router.sender

    def sender(self: Router, source: Peer) -> Any:
        send = original(self, source)

        def sending(target: Peer, message: Message) -> None:
            send(target, message)
            self.admission.check(arrived(message))
            found.append(message)

        return sending

    monkeypatch.setattr(Router, "sender", sender)
    return found


def use_all(cluster: InProcessCluster, routers: Sequence[Router]) -> None:
    """Trains, fails, reads, sets, stops, takes back."""
    trained(cluster, 2)
    snapshot = cluster.snapshot("state")
    cluster.snapshot("standing")
    state = dict(snapshot.state)
    cluster.wait(
        cluster.client.install(snapshot.version, snapshot.weights, snapshot.records, state),
        "an install",
    )
    trained(cluster, 1)
    cluster.log()
    cluster.client.ask(5, False)
    cluster.wait(cluster.client.stop(), "a stop")
    cluster.wait(cluster.client.revoke(), "a new generation")
    assert sum(router.refused for router in routers) == 0


STRATEGIES: dict[str, Strategy] = {
    **{name: mode(name) for name in MODES},
    "local": LocalStrategy(sync_every=2, chunk_bytes=64),
    "clipped": mode("sync", clip_norm=0.01, wire_dtype="bf16"),
    "skipping": mode("async", nonfinite="skip"),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_that_a_strategy_says_is_refused(
    name: str, workers: int, said: list[Message]
) -> None:
    task = Task(
        optimizer=lambda module: torch.optim.Adam(module.parameters(), amsgrad=True),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        metrics={"error": lambda output, target: (output - target).abs().mean()},
    )
    if name == "backup" and workers == 1:
        workers = 2
    cluster = InProcessCluster(
        task.creator(), num_workers=workers, strategy=STRATEGIES[name], keep_log=True
    )
    use_all(cluster, [*cluster.server_routers, *cluster.worker_routers, cluster.client_router])


def test_nothing_that_relays_say_is_refused(said: list[Message]) -> None:
    cluster = make("sync", hosts=HostMap((0, 0, 1), (0, 1), gathers=True))
    use_all(cluster, [*cluster.server_routers, *cluster.worker_routers, cluster.client_router])
    assert {message.source.role for message in said if message.source is not None} >= {
        "aggregator",
        "client",
    }


@pytest.mark.parametrize("name", ["sync", "copies", "async", "backup", "ssp-0"])
def test_nothing_that_is_said_when_things_go_wrong_is_refused(
    name: str, said: list[Message]
) -> None:
    faults = [
        Fault.raises("worker", 1, step=1),
        Fault.kill("worker", 0, step=3),
        Fault.slow("worker", 2, step=0, factor=3),
    ]
    cluster = make(name, replaces=True, faults=faults)
    done = 0
    while done < 6:
        done += sum(isinstance(outcome, Result) for outcome in cluster.step(6 - done))
    cluster.client.declare_lost(1, cluster.lives[1], "it is silent")
    cluster.on_left = lambda worker: (cluster.kill(worker), cluster.replace(worker))[0]
    cluster.step(1)
    cluster.network.remove(cluster.server_routers[1])
    cluster.client.ask(1, True)
    cluster.network.run_until(
        lambda: not cluster.client.outcomes.empty(), "the word that a server is gone"
    )
    assert {Kind.FAILED, Kind.WORKER_LOST, Kind.JOIN} <= {message.kind for message in said}
    assert sum(router.refused for router in [*cluster.server_routers, *cluster.worker_routers]) == 0


def use(crowd: GroupInOneThread) -> None:
    for user in crowd.users[:2]:
        crowd.wait(user.push(like(crowd.initial, 1.0)))
        crowd.wait(user.pull(["a"], None)[0])
        crowd.wait(user.push_pull(like(crowd.initial, 1.0))[0])


@pytest.mark.parametrize("optimizer", [None, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)])
def test_nothing_that_a_parameter_servers_users_say_is_refused(
    optimizer: Any, said: list[Message]
) -> None:
    crowd = GroupInOneThread({"a": torch.zeros(5, 3), "b": torch.zeros(7)}, optimizer=optimizer)
    use(crowd)
    refusal = crowd.users[0].push(like(crowd.initial, float("nan")))
    crowd.network.run_until(refusal.done, "a refusal")
    snapshot = crowd.state()
    crowd.wait(crowd.users[1].client.install(0, snapshot.weights, snapshot.records))
    crowd.wait(crowd.users[1].client.counters())
    crowd.users[1].die()
    crowd.settle()
    crowd.pull()
    assert sum(router.refused for router in crowd.routers) == 0


# -- who is who --------------------------------------------------------------------------------------


def refusals(crowd: GroupInOneThread) -> int:
    return sum(router.refused for router in crowd.routers)


@pytest.mark.parametrize("kind", [*DECISIONS, Kind.ASK, Kind.REVOKE, Kind.STOP])
@pytest.mark.parametrize("role", ["worker", "client", "coordinator", "server"])
def test_a_user_cannot_decide_for_all(kind: Kind, role: str) -> None:
    crowd = GroupInOneThread()
    use(crowd)
    before = crowd.value()
    user = crowd.users[1]
    own = user.links[0].other
    assert own is not None
    source = Peer(role, own.peers[0].index if role in ("worker", "client") else 0)
    for server, target in enumerate((server_peer(0), server_peer(1), COORDINATOR)):
        version = {"version": 99} if "version" in body_of(kind).__struct_fields__ else {}
        user.links[server % 2].send(said_of(kind, None, source, target, **version))
    crowd.settle()
    assert refusals(crowd) == 3
    assert crowd.value() == before
    crowd.wait(crowd.users[0].push(like(crowd.initial, 1.0)))
    assert crowd.value() == before + 1


@pytest.mark.parametrize(
    "claimed", [COORDINATOR, server_peer(0), server_peer(1), server_peer(9), worker_peer(100)]
)
def test_nobody_takes_the_place_of_one_who_is_connected(claimed: Peer) -> None:
    crowd = GroupInOneThread()
    use(crowd)
    before = crowd.value()
    router = crowd.network.router()
    for near, server in zip(crowd.routers, crowd.servers, strict=True):
        link = crowd.network.connect(router, (worker_peer(555), claimed), near, tuple(near._roles))
        link.send(
            said_of(Kind.COMMIT, None, claimed, next(iter(near._roles)), version=server.version + 1)
        )
        link.close()
    crowd.settle()
    assert refusals(crowd) >= len(crowd.servers) - (claimed == server_peer(1))
    crowd.wait(crowd.users[0].push(like(crowd.initial, 1.0)))
    assert crowd.value() == before + 1


def test_a_worker_speaks_for_itself_alone() -> None:
    cluster = make("async", Task(optimizer=sgd()))
    trained(cluster, 1)
    link = next(link for link in cluster.links[worker_peer(1)] if server_peer(0) in link.peers)
    version = cluster.coordinator.version
    place = {"generation": cluster.coordinator.generation, "version": version}
    link.send(said_of(Kind.FAILED, None, worker_peer(0), COORDINATOR, **place))
    trained(cluster, 1)
    assert cluster.server_routers[0].refused == 1


# -- bounds ------------------------------------------------------------------------------------------


class Sent(list[Any]):
    """What a role sends."""

    def __call__(self, target: Peer, message: Message) -> None:
        self.append((target, message))


def server_of(cluster: InProcessCluster) -> Server:
    return cluster.servers[0]


def push(server: Server, worker: int, **fields: Any) -> Message:
    chunk = next(index for index, held in server.chunks.items() if held.chunk.trainable)
    size = server.chunks[chunk].chunk.nbytes
    payload = torch.zeros(size, dtype=torch.uint8)
    return said_of(Kind.PUSH, payload, **{"chunk": chunk, "unit": 1.0, "total": 1.0, **fields})


def test_early_pushes_are_bounded_and_the_job_goes_on() -> None:
    cluster = make("sync", Task(optimizer=sgd()))
    trained(cluster, 1)
    server, refused = server_of(cluster), 0
    for generation in range(2, 1000):
        try:
            server.handle(
                worker_peer(1), push(server, 1, generation=generation, sequence=generation)
            )
        except ProtocolError as error:
            assert re.search("oldest push, of chunk .* dropped", str(error))  # noqa: PT017
            refused += 1
    assert refused > 900
    trained(cluster, 2)
    other = make("sync", Task(optimizer=sgd()))
    trained(other, 3)
    assert same_bits(cluster.weights(), other.weights())


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_user_who_only_pushes_is_refused_at_some_point(chunk: int) -> None:
    crowd = GroupInOneThread({"a": torch.zeros(40)}, servers=1, users=1)
    server, refused = crowd.servers[0], []
    for sequence in range(1, 1100):
        message = push(server, 100, sequence=sequence, chunk=list(server.chunks)[chunk])
        message.payload = None
        try:
            server.handle(worker_peer(100), message)
        except ProtocolError as error:
            refused.append(str(error))
    assert len(refused) == 1099 - 1024
    assert "worker 100 has 1024 pushes that are not committed" in refused[0]
    other = crowd.join(200)
    crowd.wait(other.push(like(crowd.initial, 1.0)))


def test_reports_without_pushes_are_bounded() -> None:
    crowd = GroupInOneThread()
    for sequence in range(1, 1025):
        crowd.coordinator.handle(worker_peer(100), said_of(Kind.PUSHED, sequence=sequence))
    with pytest.raises(ProtocolError, match="1024 pushes of worker 100 are not complete"):
        crowd.coordinator.handle(worker_peer(100), said_of(Kind.PUSHED, sequence=1025))
    crowd.wait(crowd.users[1].push(like(crowd.initial, 1.0)))


def test_states_that_are_put_and_not_installed_are_bounded() -> None:
    crowd = GroupInOneThread({"a": torch.zeros(8)}, servers=1)
    server, client = crowd.servers[0], Peer("client", 100)
    payload = torch.zeros(server.chunks[0].chunk.nbytes, dtype=torch.uint8)
    put = lambda sequence: said_of(Kind.PUT, payload, sequence=sequence)  # noqa: E731
    for sequence in range(1, 17):
        server.handle(client, put(sequence))
    with pytest.raises(ProtocolError, match="has put 16 states that it has not had installed"):
        server.handle(client, put(17))
    server.handle(client, put(3))
    weights = crowd.arrays.layout.allocate()
    crowd.wait(crowd.users[1].client.install(0, weights, None))


def test_what_other_members_are_ahead_is_bounded() -> None:
    member = MemberCollective(0, 2, Router(), 1.0)
    for generation in range(1024):
        member.handle(member_peer(1), said_of(MemberKind.DATA, generation=generation))
    with pytest.raises(ProtocolError, match="1024 calls or generations ahead of member 0"):
        member.handle(member_peer(1), said_of(MemberKind.DATA, generation=2000))
    with pytest.raises(ProtocolError, match="member 5 is none of 2 members"):
        member.handle(member_peer(5), said_of(MemberKind.DATA))


# -- before anything changes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"version": 9}, {"generation": 9}, {"pushes": (PushId(0, 0, 77),)}]
)
@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_commit_that_cannot_be_applied_changes_nothing(name: str, wrong: dict[str, Any]) -> None:
    cluster = make(name, Task(optimizer=sgd()))
    trained(cluster, 1)
    server = server_of(cluster)
    before = (
        server.generation,
        server.version,
        {i: held.weights.clone() for i, held in server.chunks.items()},
    )
    place = {"generation": server.generation, "version": server.version + 1, "rate": 1.0}
    word = said_of(Kind.COMMIT, **{**place, **wrong})
    with pytest.raises(ProtocolError, match="COMMIT"):
        server.handle(COORDINATOR, word)
    assert (server.generation, server.version) == before[:2]
    assert all(torch.equal(held.weights, before[2][index]) for index, held in server.chunks.items())
    trained(cluster, 1)


def test_a_worker_reports_one_push_for_one_lease() -> None:
    cluster = make("async", Task(optimizer=sgd()))
    trained(cluster, 2)
    coordinator = cluster.coordinator
    place = {"generation": coordinator.generation, "pulled": coordinator.version}
    word = said_of(Kind.REPORT, sequence=500, samples=1, **place)
    with pytest.raises(ProtocolError, match="no lease"):
        coordinator.handle(worker_peer(1), word)
    word = with_fields(word, pulled=coordinator.version + 1)
    with pytest.raises(ProtocolError, match="REPORT of a push from version"):
        coordinator.handle(worker_peer(1), word)
    trained(cluster, 1)


def test_a_request_that_is_refused_is_answered() -> None:
    """Whatever the coordinator takes it for: nobody waits for ever, and the job goes on."""
    cluster = make("sync")
    trained(cluster, 2)
    client, weights = cluster.client, cluster.snapshot("state").weights
    odd = client.install(2, weights, [], {"schedule": "x"})
    with pytest.raises(
        ConfigurationError, match="coordinator refuses the state, .*: INSTALL from .* with state="
    ):
        cluster.wait(odd, "install a state")
    with pytest.raises(ConfigurationError, match="coordinator refuses the state, .*give `int` <= "):
        cluster.wait(client.install(1 << 62, None, None), "install a state")
    with pytest.raises(
        ProtocolError, match="coordinator refuses a request: READ from .* with what='x'"
    ):
        cluster.wait(client.read("x"), "read a state")
    assert cluster.router(COORDINATOR).refused == 3
    trained(cluster, 2)
    client.ask(1, True, rates=[(0, "x")])  # type: ignore[list-item]
    with pytest.raises(ProtocolError, match="coordinator refuses a request: ASK from .*rates"):
        cluster.step()
    trained(cluster, 2)


def test_who_waits_for_steps_hears_that_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(optimizer=sgd(momentum=0.9))
    with (
        Simulation(1).running(),
        DistributedSGD(task.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=2, progress=False)
        with monkeypatch.context() as patch:
            patch.setattr(trainer._training.rates, "since", lambda step: [(0, "x")])
            with pytest.raises(ProtocolError, match="refuses a request: ASK"):
                trainer.fit(steps=2, progress=False)
        trainer.fit(steps=2, progress=False)
        assert difference(trainer.weights(), task.trace(2, 4)[-1]) < 1e-12


def state_of(crowd: GroupInOneThread, key: str, value: torch.Tensor) -> Any:
    about = {"name": "a", "key": key, "start": 0, "stop": 8, "plain": False}
    return crowd.users[1].client.install(0, crowd.arrays.layout.allocate(), [(0, about, value)])


@pytest.mark.parametrize("value", [torch.ones(1), torch.ones(3), torch.ones(8).half()])
def test_optimizer_state_of_another_size_is_refused_as_it_comes(value: torch.Tensor) -> None:
    crowd = GroupInOneThread(
        {"a": torch.zeros(8)},
        servers=1,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.5),
    )
    crowd.wait(crowd.users[0].push(like(crowd.initial, 1.0)))
    with pytest.raises(ConfigurationError, match="server 0 refuses the state, nothing of which"):
        crowd.wait(state_of(crowd, "momentum_buffer", value))
    assert refusals(crowd) == 1
    crowd.wait(crowd.users[0].push(like(crowd.initial, 1.0)))
    crowd.wait(state_of(crowd, "momentum_buffer", torch.ones(8)))


def test_optimizer_state_with_which_no_step_can_be_taken_is_not_installed() -> None:
    crowd = GroupInOneThread(
        {"a": torch.zeros(8)}, servers=1, optimizer=lambda ps: torch.optim.RMSprop(ps, lr=1.0)
    )
    crowd.wait(crowd.users[0].push(like(crowd.initial, 1.0)))
    before = crowd.pull()[1]
    with pytest.raises(ConfigurationError, match="with which no step can be taken: 'step'"):
        crowd.wait(state_of(crowd, "square_avg", torch.ones(8)))
    assert refusals(crowd) == 1
    assert torch.equal(crowd.pull()[1]["a"], before["a"])
    crowd.wait(crowd.users[0].push(like(crowd.initial, 1.0)))


def test_a_gradient_of_an_absurd_weight_is_one_that_is_not_finite() -> None:
    cluster = make("async", Task(optimizer=sgd()))
    server = server_of(cluster)
    sent = Sent()
    server._intake._send = sent
    for index in [i for i, held in server.chunks.items() if held.chunk.trainable]:
        cluster.network.run_until(lambda: server.generation > 0, "the first generation")
        weights = {"chunk": index, "unit": 1e100, "total": 1e-300}
        message = push(server, 1, generation=server.generation, sequence=9, **weights)
        message.payload = torch.ones(
            server.chunks[index].chunk.nbytes // 8, dtype=torch.float64
        ).view(torch.uint8)
        server.handle(worker_peer(1), message)
    (_, staged) = sent[-1]
    assert staged.kind is Kind.PUSH_STAGED
    assert not torch.isfinite(torch.tensor(staged.body.squares))


def test_a_packed_gradient_that_is_none_is_refused_as_it_comes_and_the_step_goes_on() -> None:
    task = Task(lambda: perceptron(torch.float32), sgd(), samples(13, dtype=torch.float32))

    def train() -> InProcessCluster:
        strategy = ParameterServerStrategy(chunk_bytes=1024, compression=TopK(0.1), num_servers=1)
        return InProcessCluster(task.creator(), num_workers=2, strategy=strategy)

    expected = train()
    trained(expected, 2)
    cluster = train()
    trained(cluster, 1)
    server = server_of(cluster)
    codec = cluster.job.wire_formats[0]
    layout = cluster.job.description.layout
    assert codec is not None
    size = codec.size(layout, layout.chunks[0])
    assert size is not None
    push = Push(server.generation, 0, 77, server.version, 0, 1.0, 1.0)
    message = push.pack(torch.full((size,), 255, dtype=torch.uint8))
    with pytest.raises(ProtocolError, match="elements should come"):
        server.handle(worker_peer(1), message)
    trained(cluster, 1)
    assert same_bits(cluster.weights(), expected.weights())
