"""Messages that grow with workers, parameter groups or history fit; one that does not is an error where it is sent."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from steepest.core.messages.driver import Failure, LogPage
from steepest.core.messages.gradients import PushStaged, Report, VersionStaged
from steepest.core.messages.message import (
    COORDINATOR,
    Kind,
    Message,
    Peer,
    server_peer,
    worker_peer,
)
from steepest.core.messages.schema import MAX_BODY, encode_body
from steepest.core.optim.spec import OptimizerSpec, Schedule
from steepest.core.protocol import commit_state
from steepest.core.protocol.commit_rules import CommitAll, CommitEach, CommitRule
from steepest.core.protocol.commit_state import CommitHistory, CommitState, Outgoing
from steepest.core.protocol.coordinator import Coordinator, Updates
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.core.transport.frames import encode
from steepest.errors import ConfigurationError, MessageTooLargeError
from steepest.testing import InProcessCluster, replay
from steepest.testing.network import Network
from tests.modes import make, trained
from tests.reference import Task, samples, sgd
from tests.said import said

MANY = 1000
CLIENT = Peer("client", 0)


# -- the log ----------------------------------------------------------------------------------------


def entries(workers: int, groups: int, count: int) -> list[list[Any]]:
    rates = [{"lr": 0.1 * 0.999**v} for v in range(count)]
    pushes = [[[w, 0, v + 1, v, v * workers + w] for w in range(workers)] for v in range(count)]
    return [[v + 1, pushes[v], [rates[v]] * groups, 1.0, False, 1.0] for v in range(count)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("workers", "groups"), [(8, 1), (96, 1), (8, 150), (MANY, MANY), (MANY, 30_000)]
)
def test_every_page_of_the_log_fits_into_a_message(workers: int, groups: int) -> None:
    kept, added = (
        CommitHistory(keep_log=True),
        entries(workers, groups, 20 if groups > 150 else 2000),
    )
    for entry in added:
        kept.add(entry, [0], skipped=False)
    found: list[list[Any]] = []
    while len(found) < len(added):
        page = kept.page(len(found))
        assert page["log"], "a page of nothing"
        assert len(encode_body(LogPage(1, **page).pack())) < MAX_BODY / 2
        found += page["log"]
    assert found == added


def test_a_log_of_many_pages_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_state, "LOG_PAGE", 400)
    cluster = make("sync", Task(optimizer=sgd(momentum=0.9), data=samples(23)))
    trained(cluster, 30)
    pages: list[int] = []

    def measure(message: Message) -> list[Message]:
        if message.kind is Kind.LOG_PAGE and message.target == CLIENT:
            pages.append(len(encode_body(message)))
        return [message]

    cluster.network.filter = measure
    log = cluster.log()
    assert [commit.version for commit in log.commits] == list(range(1, 31))
    assert len(pages) > 5
    assert max(pages) < 800
    replay(log, Task(optimizer=sgd(momentum=0.9), data=samples(23)).creator())


# -- what the coordinator says ------------------------------------------------------------------------


@functools.cache  # torch compares each group with all before it
def many_groups() -> OptimizerSpec:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(MANY)]
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": 0.1 / (i + 3)} for i, p in enumerate(parameters)]
    )
    names = {id(p): f"layer.{i}.weight" for i, p in enumerate(parameters)}
    return OptimizerSpec.read(
        optimizer, names, lr_scheduler=lambda o: OneCycleLR(o, max_lr=0.1, total_steps=100)
    )


def large(rule: CommitRule, servers: int) -> Coordinator:
    schedule = Schedule(many_groups())
    state = CommitState(
        members=frozenset(range(MANY)),
        servers=tuple(range(servers)),
        holding=frozenset(range(servers)),
        rule=rule,
        schedule=schedule,
        keep_log=True,
        witnessed=True,
    )
    return JobCoordinator(state, Updates(schedule.at), step_timeout=60.0, replaces=True)


def largest(out: Outgoing, seen: Counter[str]) -> None:
    """Every message of these as a wire would have it; notes the most bytes of each kind."""
    encoded: dict[int, int] = {}
    for target, message in out:
        if id(message.body) not in encoded:
            message.source, message.target = COORDINATOR, target
            encoded[id(message.body)] = len(encode(message))
        seen[message.kind.name] = max(seen[message.kind.name], encoded[id(message.body)])


def report(worker: int, generation: int, sequence: int, version: int) -> Message:
    sums = 8.0, 8, 1 << 40, 1 << 40
    means = 0.1234567890123456, {"m": 0.1}, {"compute": 0.1}
    return Report(generation, 0, sequence, version, *sums, *means).pack()


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("rule", [CommitAll(), CommitEach()], ids=["together", "each"])
def test_with_a_thousand_workers_and_groups_no_decision_outgrows_a_message(
    rule: CommitRule,
) -> None:
    coordinator, seen = large(rule, 2), Counter[str]()
    for worker in range(MANY):
        largest(coordinator.handle(worker_peer(worker), said(Kind.JOIN)), seen)
    largest(
        coordinator.handle(CLIENT, said(Kind.ASK, sequence=1, steps=2)),
        seen,
    )
    generation, together = coordinator.generation, rule.needs_all
    for version in range(2):
        for worker in range(MANY if together else 60):
            source = worker_peer(worker)
            largest(
                coordinator.handle(
                    source, report(worker, generation, version + 1, coordinator.version)
                ),
                seen,
            )
            for server in () if together else range(2):
                named = generation, 0, version + 1, coordinator.version, worker
                staged = PushStaged(*named, squares=0.1).pack()
                largest(coordinator.handle(server_peer(server), staged), seen)
        for server in range(2) if together else ():
            staged = VersionStaged(generation, coordinator.version, squares=0.1).pack()
            largest(coordinator.handle(server_peer(server), staged), seen)
    assert coordinator.version >= 2
    largest(coordinator.handle(CLIENT, said(Kind.READ, sequence=2, what="state")), seen)
    largest(coordinator.handle(CLIENT, said(Kind.READ_COUNTERS, sequence=3)), seen)
    largest(coordinator.lost(worker_peer(3), "killed"), seen)
    assert {"COMMIT", "MEMBERS", "SNAPSHOT", "COUNTERS", "WORKER_LOST"} <= seen.keys()
    assert ("GRANT" in seen, "LEASE" in seen, "RESULT" in seen) == (
        together,
        not together,
        together,
    )
    assert max(seen.values()) < MAX_BODY / 2, seen


class Named(nn.Module):
    """So many parameters that NaN in all of them, of all workers, has a long list of names."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({f"{i:03}{'x' * 60}": torch.ones(()) for i in range(200)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.weights.values())).sum().expand(len(x), 1) * float("nan")


@pytest.mark.parametrize("name", ["sync", "async"])
def test_nan_everywhere_names_some_of_it(name: str) -> None:
    task = Task(
        Named,
        sgd(),
        samples(8, dtype=torch.float32),
        lambda output, target: output.mean(),
        batch_size=1,
    )
    cluster = make(name, task, workers=4)
    told: list[int] = []

    def measure(message: Message) -> list[Message]:
        if message.kind in (Kind.VERSION_STAGED, Kind.PUSH_STAGED, Kind.FAILURE):
            told.append(len(encode_body(message)))
        return [message]

    cluster.network.filter = measure
    (failure,) = cluster.step(1)
    assert failure.reason == "nonfinite"
    assert failure.culprits
    assert max(told) < 20_000


@pytest.mark.long
def test_hyperparameters_that_do_not_fit_into_a_commit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2600)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)
    names = {id(p): str(i) for i, p in enumerate(parameters)}
    monkeypatch.setattr("steepest.core.optim.spec.MOST_BYTES", 30_000)
    with pytest.raises(
        ConfigurationError, match=r"of 2600 parameter groups, at most 30000 fit into a commit"
    ):
        OptimizerSpec.read(
            optimizer, names, learning_rate=None, lr_scheduler=lambda o: OneCycleLR(o, 0.1, 100)
        )


# -- what does not fit ------------------------------------------------------------------------------


def measuring(count: int, length: int) -> Any:
    """A model with so many metrics, their names so long."""
    named = {f"{i:06}{'x' * length}": lambda output, target: output.mean() for i in range(count)}
    return Task(optimizer=sgd(), data=samples(8), metrics=named).creator()


@pytest.mark.parametrize(
    ("count", "length", "reason"),
    [
        (10_001, 1, r"it has 10001 metrics, at most 10000 fit"),
        (50, 100_000, rf"REPORT .* at most {MAX_BODY} fit"),
    ],
)
def test_metrics_that_do_not_fit_fail_the_step_of_their_worker(
    count: int, length: int, reason: str
) -> None:
    cluster = InProcessCluster(measuring(count, length), num_workers=2)
    for _ in range(2):
        (failure,) = cluster.step(1)
        assert (type(failure), failure.reason) == (Failure, "raised")
        assert re.search(reason, failure.error)


class Talker:
    """A role that answers with more than fits."""

    def __init__(self, send: Any) -> None:
        self.send = send

    def handle(self, source: Peer, message: Message) -> None:
        self.send(source, said(Kind.RESULT, metrics={"x" * MAX_BODY: 1.0}))

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        return None

    def lost(self, peer: Peer, reason: str) -> None:
        """Nothing."""

    def tick(self, now: float) -> None:
        """Nothing."""


def test_what_does_not_fit_is_not_taken_for_a_message_that_makes_no_sense() -> None:
    network = Network()
    near, far = network.router(), network.router()
    network.connect(near, (CLIENT,), far, (COORDINATOR,))
    far.host(COORDINATOR, Talker(far.sender(COORDINATOR)))
    near.sender(CLIENT)(COORDINATOR, said(Kind.ASK, steps=1))
    with pytest.raises(
        MessageTooLargeError,
        match=rf"RESULT for client 0 carries \d+ bytes .* at most {MAX_BODY} fit",
    ):
        network.run_until(lambda: False, "the answer")
    assert far.refused == 0


def test_who_asks_for_too_much_is_told() -> None:
    cluster = InProcessCluster(Task(optimizer=sgd()).creator(), num_workers=2)
    with pytest.raises(MessageTooLargeError, match="INSTALL for coordinator"):
        cluster.wait(
            cluster.client.install(0, None, None, {"history": "x" * MAX_BODY}), "the installation"
        )
