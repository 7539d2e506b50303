"""The coordinator alone, where a text script (`tests.protocol.script`) does not show it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from steepest.core.engine.coordinator_role import CoordinatorRole
from steepest.core.messages.fields import Limits
from steepest.core.messages.gradients import Report
from steepest.core.messages.means import Measured, mean_metrics
from steepest.core.messages.message import Kind, Message, Peer, server_peer, worker_peer
from steepest.core.messages.schema import encode_body, reader_of
from steepest.core.messages.snapshots import Install
from steepest.core.protocol.commit_rules import (
    CommitAll,
    Staged,
    Verdict,
)
from steepest.core.protocol.commit_state import CommitState, Outgoing
from steepest.core.protocol.coordinator import Coordinator, Updates
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.core.protocol.step_summary import OpenStep, summarize
from steepest.errors import ProtocolError
from tests.hand_moved_clock import HandMovedClock
from tests.said import said

CLIENT = Peer("client", 0)
REQUESTS = WeakKeyDictionary[Coordinator, Iterator[int]]()  # the numbers of those to come


def make(
    workers: int = 2, servers: int = 2, holding: set[int] | None = None, **settings: Any
) -> Coordinator:
    """A coordinator whose members have not joined."""
    state = CommitState(
        members=frozenset(range(workers)),
        servers=tuple(range(servers)),
        holding=frozenset(range(servers) if holding is None else holding),
        rule=CommitAll(),
    )
    step_timeout = settings.pop("step_timeout", 10.0)
    updates = Updates(settings.pop("hyperparameters", lambda step: [{}]), **settings)
    return JobCoordinator(state, updates, step_timeout=step_timeout)


def started(workers: int = 2, servers: int = 2, steps: int = 1, **settings: Any) -> Coordinator:
    """A coordinator whose members have joined and who was asked for steps."""
    coordinator = make(workers, servers, **settings)
    for worker in range(workers):
        coordinator.handle(worker_peer(worker), said(Kind.JOIN))
    if steps:
        ask(coordinator, steps)
    return coordinator


def ask(
    coordinator: Coordinator, steps: int = 1, number: int | None = None, **meta: Any
) -> Outgoing:
    if number is None:
        number = next(REQUESTS.setdefault(coordinator, itertools.count(1)))
    fields = {"generation": coordinator.generation, "steps": steps, **meta}
    return coordinator.handle(CLIENT, said(Kind.ASK, sequence=number, **fields))


def report(
    coordinator: Coordinator, worker: int, *, overflowed: bool = False, **fields: Any
) -> Outgoing:
    fields = {
        "generation": coordinator.generation,
        "pulled": coordinator.version,
        "total": 4.0,
        "samples": 4,
        "bytes_pushed": 100,
        "bytes_pulled": 50,
        "loss": 1.0,
        "overflowed": overflowed,
        **fields,
    }
    return coordinator.handle(worker_peer(worker), said(Kind.REPORT, **fields))


def staged(
    coordinator: Coordinator, server: int, meta: dict[str, Any] | None = None, **fields: Any
) -> Outgoing:
    fields = {"generation": coordinator.generation, "version": coordinator.version, **fields}
    word = said(Kind.VERSION_STAGED, **{**fields, **(meta or {"squares": 1.0})})
    return coordinator.handle(server_peer(server), word)


def complete(coordinator: Coordinator, workers: int = 2, servers: int = 2) -> Outgoing:
    """Everything that one step needs; what the last event brought."""
    for server in range(servers):
        staged(coordinator, server)
    out: Outgoing = []
    for worker in range(workers):
        out = report(coordinator, worker, sequence=10 + worker)
    return out


def kinds(out: Outgoing) -> list[tuple[str, str]]:
    return [(str(peer), message.kind.name) for peer, message in out]


def only(out: Outgoing, kind: Kind) -> Message:
    (found,) = [message for _, message in out if message.kind is kind]
    return found


@pytest.mark.parametrize("nonfinite", ["refuse", "skip", "pass"])
def test_an_update_that_a_worker_wants_left_out_changes_nothing(nonfinite: str) -> None:
    """Whatever is done with NaN and infinity that no worker has spoken of."""
    coordinator = started(nonfinite=nonfinite)
    infinite = {"squares": math.inf, "culprits": [[1, "weight"]]}
    staged(coordinator, 0, infinite if nonfinite != "pass" else None)
    staged(coordinator, 1)
    report(coordinator, 0)
    out = report(coordinator, 1, overflowed=True)
    assert [m.body.skip for _, m in out if m.kind is Kind.COMMIT] == [True, True]
    assert coordinator.version == 1


def test_a_schedule_that_raises_fails_the_step_instead_of_hanging() -> None:
    coordinator = started(steps=2, hyperparameters=lambda step: [[{}], []][step] or [{}][step])
    complete(coordinator)
    failure = only(complete(coordinator), Kind.FAILURE).body
    assert (failure.reason, failure.step, failure.error) == (
        "schedule",
        1,
        "IndexError: list index out of range",
    )
    assert "test_coordinator.py" in failure.traceback
    assert coordinator.version == 1


def test_the_synchronous_rule_commits_all_or_none_in_the_order_of_workers() -> None:
    pushes = (Staged(2, 0, 5, 0), Staged(0, 0, 9, 0), Staged(1, 0, 1, 0))
    assert CommitAll().decide(0, frozenset({0, 1, 2}), pushes).commit == (
        pushes[1],
        pushes[2],
        pushes[0],
    )
    assert CommitAll().decide(0, frozenset({0, 1, 2}), pushes[:2]) == Verdict()


def test_a_summary_has_means_by_weight_and_sums() -> None:
    def said(
        total: float, samples: int, loss: float, metrics: dict[str, float], compute: float
    ) -> Report:
        timings = {"compute": compute}
        return Report(0, 0, 0, 0, total, samples, 10, 5, loss, metrics, timings)

    reports = [
        (0, said(1.0, 2, 4.0, {"a": 1.0, "b": 5.0}, 0.1), 0),
        (1, said(3.0, 4, 8.0, {"a": 3.0}, 0.3), 2),
        (2, said(0.0, 0, 0.0, {}, 0.0), 1),
    ]
    found = summarize(reports, [1.0, None, 4.0], True)
    assert found["timings"].pop("compute") == pytest.approx(0.4 / 3)
    assert found == {
        "gradient_norm": 2.5,
        "staleness": [0, 2, 1],
        "samples": 6,
        "bytes_pushed": 30,
        "bytes_pulled": 15,
        "loss": 7.0,
        "metrics": {"a": 2.5, "b": 5.0},
        "timings": {},
        "spent": [(0, 0.0, 0.1, 0.0), (1, 0.0, 0.3, 0.0)],
    }
    sums = {"staleness": [0, 2, 1], "samples": 6, "bytes_pushed": 30, "bytes_pulled": 15}
    assert summarize(reports, [None], False) == sums
    assert math.isnan(summarize(reports[2:], [], True)["loss"])


def test_another_coordinator_goes_on_with_a_step_that_has_begun() -> None:
    """Its state travels in messages, and back from a server or a client."""
    place = {
        "generation": 0,
        "incarnation": 0,
        "sequence": 1,
        "bytes_pushed": 10,
        "bytes_pulled": 5,
    }
    notes, timings = [(7, 1.0, {"x": 2.0})], {"compute": 0.1}
    reports = [
        Report(**place, pulled=0, total=1.0, samples=2, loss=4.0, timings=timings, notes=notes),
        Report(
            **place, pulled=1, total=3.0, samples=4, loss=8.0, metrics={"a": 3.0}, more=[[1, 2]]
        ),
    ]
    alone, first, second = OpenStep(), OpenStep(), OpenStep()
    for step in (alone, first):
        step.add_norm(1.0)
        step.add(1, reports[0], 0)
    state = first.state()
    travelled = Install(1, 2, state={"ledger": [0], **state})
    second.load(reader_of(Install).read(encode_body(travelled.pack()), Limits(chunks=4)).state)
    for step in (alone, second):
        step.add_norm(None)
        step.add(0, reports[1], 1)
    assert second.end(True) == alone.end(True)
    assert second.state() == {}
    for damaged in ({"reports": 1, "norms": []}, {"reports": [[0, [1], 0]], "norms": []}, {}):
        with pytest.raises(ProtocolError, match="a step that has begun"):
            second.load({"open": damaged})


def test_metrics_with_weights_of_their_own_are_averaged_by_them() -> None:
    parts = [
        Measured({"a": 1.0, "b": 1.0}, 1.0, {"b": 9.0}),
        Measured({"a": 2.0, "b": 2.0}, 3.0, {"b": 1.0}),
        Measured({"a": math.nan, "b": math.nan, "c": 4.0}, 0.0, {"b": 0.0, "c": 0.0}),
    ]
    assert mean_metrics(parts) == ({"a": 1.75, "b": 1.1, "c": 4.0}, {"b": 10.0, "c": 0.0})
    reports = [
        (0, Report(0, 0, 0, 0, e.weight, 1, 0, 0, 1.0, {"b": e.metrics["b"]}, weights=e.weights), 0)
        for e in parts[:2]
    ]
    assert summarize(reports, [], True)["metrics"] == {"b": pytest.approx(1.1)}
    assert [report.weights for _, report, _ in reports] == [{"b": 9.0}, {"b": 1.0}]
    assert math.isnan(mean_metrics([Measured({"a": 1.0}, 0.0, {})])[0]["a"])


def test_results_of_short_steps_wait_for_each_other_but_never_for_the_last(
    clock: HandMovedClock,
) -> None:
    class Script:
        """A coordinator of which the next step is committed with each message, and given up with some kinds."""

        version, limit, logged = 0, 5, math.inf
        settled = 0
        holding = frozenset([0])
        unsettled: list[tuple[Peer, Message]] = []

        def decide(self, source: Peer, message: Message) -> list[tuple[Peer, Message]]:
            if message.kind is Kind.WEIGHTS:
                raise ProtocolError("no coordinator takes them")
            self.version += 1
            result = (CLIENT, said(Kind.RESULT, version=self.version))
            failure = (CLIENT, said(Kind.FAILURE, version=self.version))
            commit = (server_peer(0), said(Kind.COMMIT))
            if message.kind in (Kind.GIVE_UP, Kind.PUSH_STAGED):
                return [commit, failure]
            self.unsettled.append(result)
            return [commit]

        def settle(self) -> list[tuple[Peer, Message]]:
            self.settled += 1
            found, self.unsettled = self.unsettled, []
            return found

        def tick(self, now: float) -> list[tuple[Peer, Message]]:
            return self.settle()

    told: list[int] = []
    commits: list[Peer] = []
    script = Script()

    def send(peer: Peer, message: Message) -> None:
        commits.append(peer) if message.kind is Kind.COMMIT else told.append(message.body.version)

    role = CoordinatorRole(script, send, pause=1.0)  # type: ignore[arg-type]

    def steps(count: int, kind: Kind = Kind.VERSION_STAGED) -> list[int]:
        for _ in range(count):
            role.handle(server_peer(0), said(kind))
        return told

    assert steps(3) == [1]  # the others so soon after it wait
    assert len(commits) == 3  # which the servers' orders do not
    assert script.settled == 1  # nor are they made
    with pytest.raises(ProtocolError):  # a message that makes no sense costs no result
        role.handle(server_peer(0), said(Kind.WEIGHTS))
    clock.seconds += 1.0
    assert steps(1) == [1, 2, 3, 4]
    assert steps(1) == [1, 2, 3, 4, 5]  # the last that was asked for
    script.limit = 10
    assert steps(1) == [1, 2, 3, 4, 5]
    role.tick(0.0)
    assert told == [1, 2, 3, 4, 5, 6]
    assert steps(1) == [1, 2, 3, 4, 5, 6]
    # bad news goes at once, after what was before it
    assert steps(1, Kind.GIVE_UP) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps(1) == [1, 2, 3, 4, 5, 6, 7, 8]
    script.limit = 20
    assert steps(1, Kind.PUSH_STAGED) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
