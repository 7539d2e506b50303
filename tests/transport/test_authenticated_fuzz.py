"""Whoever has the token may say anything: processes go on, and what is refused changes nothing."""

from __future__ import annotations

import gc
import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import Kind, Message, Peer
from steepest.core.messages.permissions import TRAINING
from steepest.core.messages.users import OPEN
from steepest.errors import ModelRaisedError, ProtocolError
from steepest.tables.job.row_messages import LINES
from steepest.testing import Fault, InProcessCluster, Link, Network
from tests.fuzzing import Recorder, go_on, tell
from tests.group_in_one_thread import GroupInOneThread, like
from tests.modes import check, check_counts, make, trained
from tests.reference import Task, Weights, same_bits, sgd
from tests.table_tasks import installable, rows_of, table_task
from tests.unusual_optimizers import Raising

STEPS = 3
WORDS = 12  # that are said to one job
JOBS = (
    "sync",
    "aggregators",
    "copies",
    "allreduce",
    "replicated",
    "async-drop",
    "backup",
    "ssp-0",
    "async",
)
WITH_TABLES = ("copies", "allreduce", "async")
SEEDS = st.integers(0, 2**48)
few = settings(deadline=None, database=None, phases=(Phase.generate,))


def task(name: str) -> Task:
    return table_task() if name in WITH_TABLES else Task(optimizer=sgd(momentum=0.9))


def job(name: str) -> InProcessCluster:
    if name == "aggregators":
        hosts = HostMap((0, 0, 1), (0, 1), gathers=True)
        return make("sync", task(name), hosts=hosts)
    return make(name, task(name))


@pytest.mark.long
def test_what_is_changed_has_everything_in_it() -> None:
    found = {about(message) for name in JOBS for message in undisturbed(name)[1]}
    # simulated groups need no keys; what a worker does with others' is in tests/strategies/test_process_groups.py
    # and servers refuse nothing that clients of this version put
    # a worker that computes wrongly, of which an audit tells, is in tests/engine/test_audits.py
    rare = {
        (Kind.GROUP_KEY, "worker", "worker"),
        (Kind.REFUSED, "server", "client"),
        (Kind.DIFFERENCE, "coordinator", "client"),
    }
    assert {*TRAINING, *LINES} - rare <= found
    refused = {
        (Kind.REFUSED, role, "client") for role in ("server", "coordinator")
    }  # of nobody here
    assert {about(message) for message in undisturbed_crowd()} == set(OPEN) - refused


def about(message: Message) -> tuple[Kind, str, str]:
    assert message.source is not None
    assert message.target is not None
    return message.kind, message.source.role, message.target.role


@cache
def undisturbed(name: str) -> tuple[Weights, tuple[Message, ...]]:
    """The weights after all steps, and all that was said until then and when the state was read and set."""
    cluster = job(name)
    recorder = Recorder(cluster.network)
    trained(cluster, STEPS)
    weights = everything(cluster)
    snapshot = cluster.snapshot("state")
    cluster.log()
    cluster.wait(cluster.client.stop(), "a stop")
    records = [*installable(cluster, snapshot.records)]
    cluster.wait(cluster.client.install(STEPS, snapshot.weights, records, None), "an install")
    cluster.wait(cluster.client.counters(), "counters")
    cluster.wait(cluster.client.revoke(), "a new generation")
    return weights, (*recorder.seen, *said_in_trouble(name))


def everything(cluster: InProcessCluster) -> Weights:
    """The weights, and all that servers know of rows."""
    return cluster.weights() | rows_of(cluster)


def said_in_trouble(name: str) -> list[Message]:
    """What is said when a model raises and a worker dies, where another one takes its place."""
    name = "sync" if name == "aggregators" else name
    replaced = name not in ("allreduce", "replicated")
    kill = [Fault.kill("worker", 0, step=3)] if replaced else []
    cluster = make(
        name, task(name), replaces=replaced, faults=[Fault.raises("worker", 1, step=1), *kill]
    )
    recorder = Recorder(cluster.network)
    taken = 0
    while taken < 6:
        taken += sum(isinstance(outcome, Result) for outcome in cluster.step(6 - taken))
    cluster.workers[1].join()
    cluster.client.declare_lost(1, 7, "it is silent")
    go_on(cluster.network)
    return [*recorder.seen, *said_after_a_death(name), *said_when_an_update_raises(name)]


def said_after_a_death(name: str) -> list[Message]:
    """What is said when a worker is lost for which the others wait, and when nobody takes its place."""
    waited_for = [
        Fault.slow("worker", 0, step=0, factor=50, steps=9),
        Fault.kill("worker", 0, step=2),
    ]
    found = []
    for replaces, faults in ((True, waited_for if name == "ssp-0" else []), (False, [])):
        cluster = make(name, task(name), replaces=replaces, faults=faults)
        recorder = Recorder(cluster.network)
        trained(cluster, 4)
        if not replaces:
            cluster.network.remove(cluster.worker_routers[2])
            go_on(cluster.network)
            cluster.client.install(0, None, None)
        go_on(cluster.network)
        found += recorder.seen
    return found


def said_when_an_update_raises(name: str) -> list[Message]:
    """What is said when the optimizer raises on each server, in the second step."""
    cluster = make(name, Task(optimizer=lambda module: Raising(module.parameters(), 0.1, 0.9)))
    recorder = Recorder(cluster.network)
    trained(cluster, 1)
    Raising.left += [0] * len(cluster.server_routers)  # the first is in the coordinator's process
    *_, last = [cluster.step(1)[-1] for _ in range(4)]  # results may come before an update raises
    assert isinstance(last, Failure)
    assert last.reason == "optimizer"
    Raising.left.clear()
    return recorder.seen


def stranger(cluster: Any, routers: Any, chance: random.Random) -> Link:
    """Connects somebody to one process; returns the end of the channel there."""
    router = cluster.network.router()
    near = chance.choice(routers)
    own = (Peer(chance.choice(("worker", "client", "member")), 77),)
    cluster.network.connect(router, own, near, tuple(near._roles))
    return cluster.network._transports[
        [t.router for t in cluster.network._transports].index(near)
    ].links[-1]


def no_surprise(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was refused only because it made somebody stumble."""
    stumbled = [
        record
        for record in caplog.records
        if record.exc_info and record.name.startswith("steepest")
    ]
    assert not stumbled, caplog.text
    caplog.clear()


def survive(name: str, seed: int, caplog: pytest.LogCaptureFixture, *, as_stranger: bool) -> None:
    """A job to which many things are said while it trains; its bits count as long as all of that is refused."""
    gc.collect()  # jobs with tables have reserved much address space, and are garbage in cycles
    chance = random.Random(seed)
    weights, seen = undisturbed(name)
    left = WORDS
    while left > 0:
        cluster = job(name)
        routers = [*cluster.server_routers, *cluster.worker_routers, cluster.client_router]
        own = links(cluster.network)
        for _ in range(STEPS):
            cluster.client.ask(1, True)
            go_on(cluster.network, chance.randrange(12))
            link = stranger(cluster, routers, chance) if as_stranger else None
            refused, said = tell(chance, cluster.network, seen, link)
            left -= 1
            if not refused or any(link.closed for link in own):
                go_on(cluster.network)
                break
            take_step(cluster, said)
        else:
            if name == "async":  # the log does not tell of which versions the rows were
                check_counts(cluster, cluster.log())
            elif name in ("async-drop", "ssp-0", "backup"):
                check(cluster, task(name))
            else:
                assert same_bits(everything(cluster), weights)
        no_surprise(caplog)


def links(network: Network) -> list[Link]:
    """Both ends of all channels."""
    return [link for transport in network._transports for link in transport.links]


def take_step(cluster: InProcessCluster, said: str) -> None:
    """The step that was asked for is committed; what was said in the client's name may be refused to it before."""
    outcome: Any = None
    while outcome is None or isinstance(outcome, ProtocolError):
        cluster.network.run_until(
            lambda: not cluster.client.outcomes.empty(), f"a step in spite of {said}"
        )
        outcome = cluster.client.outcomes.get()
    assert isinstance(outcome, Result), (outcome, said)


@cache
def undisturbed_crowd() -> tuple[Message, ...]:
    """All that was said to and by the servers of some arrays and their users."""
    found: list[Message] = []
    for optimizer, copies in ((None, 1), (momentum, 1), (None, 2)):
        crowd = GroupInOneThread(zeros(), optimizer=optimizer, replication=copies)
        recorder = Recorder(crowd.network)
        use(crowd)
        nan = crowd.users[0].push(like(crowd.initial, float("nan")))
        crowd.network.run_until(nan.done, "a refusal")
        assert nan.exception() is not None
        snapshot = crowd.state()
        client = crowd.users[1].client
        crowd.wait(client.install(0, snapshot.weights, snapshot.records or None), "an install")
        crowd.wait(client.counters(), "counters")
        crowd.users[1].die()
        crowd.settle()
        crowd.network.remove(crowd.routers[1])  # as a server that dies: what is staged is void
        crowd.settle()
        found += recorder.seen
    return (*found, *said_to_users_when_an_update_raises())


def said_to_users_when_an_update_raises() -> list[Message]:
    """What is said when the arrays' optimizer raises on each server."""
    crowd = GroupInOneThread(zeros(), optimizer=lambda parameters: Raising(parameters, 0.1, 0.9))
    recorder = Recorder(crowd.network)
    Raising.left += [0] * len(crowd.routers)
    crowd.wait(crowd.users[0].push(like(crowd.initial, 1.0)))  # is committed before it is applied
    refused = crowd.users[1].push(like(crowd.initial, 1.0))
    crowd.network.run_until(refused.done, "a refusal")
    assert isinstance(refused.exception(), ModelRaisedError)
    Raising.left.clear()
    return recorder.seen


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


def zeros() -> dict[str, Any]:
    return {"a": torch.zeros(5, 3), "b": torch.zeros(7)}


def use(crowd: GroupInOneThread) -> None:
    """Each user pushes, pulls a part, and does both in one."""
    for user in crowd.users[:2]:
        crowd.wait(user.push(like(crowd.initial, 1.0)))
        crowd.wait(user.pull(["a"], None)[0])
        crowd.wait(user.push_pull(like(crowd.initial, 1.0))[0])


def survive_open(seed: int, caplog: pytest.LogCaptureFixture, *, as_stranger: bool) -> None:
    """A parameter server whose users go on while somebody says many things; every update counts once all the same."""
    chance = random.Random(seed)
    seen = undisturbed_crowd()
    left = WORDS
    while left > 0:
        crowd = GroupInOneThread(zeros(), optimizer=chance.choice((None, momentum)))
        adds = crowd.group.arrays.rule == "add"
        own, clean = links(crowd.network), True
        while left > 0 and clean:
            future = crowd.users[0].push(like(crowd.initial, 1.0))
            go_on(crowd.network, chance.randrange(8))
            link = another_user(crowd, chance) if as_stranger else None
            refused, _ = tell(chance, crowd.network, seen, link)
            left -= 1
            clean = refused and not any(link.closed for link in own)
            if clean:
                crowd.wait(future, "a push")
        if clean and adds:
            assert crowd.value(1) == crowd.coordinator.version
        elif not clean:
            go_on(crowd.network)
        no_surprise(caplog)


def another_user(crowd: GroupInOneThread, chance: random.Random) -> Link:
    """One more user; returns the end of its channel at some server."""
    crowd.join()
    transport: Any = chance.choice(crowd.routers).transport
    return transport.links[-1]


def runs_long(examples: int, survives: Any) -> None:
    @settings(few, max_examples=examples)
    @given(seed=SEEDS)
    def property_(seed: int) -> None:
        survives(seed)

    property_()


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("as_stranger", [False, True])
@pytest.mark.parametrize("name", JOBS)
def test_processes_of_a_job_go_on(
    name: str, as_stranger: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs_long(2, lambda seed: survive(name, seed, caplog, as_stranger=as_stranger))


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("as_stranger", [False, True])
def test_processes_of_a_parameter_server_go_on(
    as_stranger: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs_long(8, lambda seed: survive_open(seed, caplog, as_stranger=as_stranger))


@pytest.mark.full
@pytest.mark.parametrize("as_stranger", [False, True])
@pytest.mark.parametrize("name", JOBS)
def test_processes_of_a_job_go_on_for_long(
    name: str, as_stranger: bool, caplog: pytest.LogCaptureFixture
) -> None:
    count = 15 if name in WITH_TABLES else 40
    runs_long(count, lambda seed: survive(name, seed, caplog, as_stranger=as_stranger))


@pytest.mark.full
@pytest.mark.parametrize("as_stranger", [False, True])
def test_processes_of_a_parameter_server_go_on_for_long(
    as_stranger: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs_long(200, lambda seed: survive_open(seed, caplog, as_stranger=as_stranger))
