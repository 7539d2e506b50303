"""The coordinator alone: events in, messages out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from steepest.core.engine.commit_log import Commit
from steepest.core.engine.coordinator_role import CoordinatorRole
from steepest.core.messages.driver import Counters
from steepest.core.messages.fields import MOST
from steepest.core.messages.gradients import Report
from steepest.core.messages.means import Measured, mean_metrics
from steepest.core.messages.membership import Grant, Members
from steepest.core.messages.message import Kind, Message, Peer, server_peer, worker_peer
from steepest.core.messages.snapshots import Refused
from steepest.core.protocol.closed_job import ClosedJob
from steepest.core.protocol.commit_rules import (
    CommitAll,
    CommitEach,
    CommitQuorum,
    Staged,
    Verdict,
)
from steepest.core.protocol.commit_state import CommitState, Outgoing
from steepest.core.protocol.coordinator import Coordinator
from steepest.core.protocol.step_summary import summarize
from steepest.errors import ProtocolError
from tests.hand_moved_clock import HandMovedClock

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
    return Coordinator(
        ClosedJob(state, step_timeout=settings.pop("step_timeout", 10.0)),
        settings.pop("hyperparameters", lambda step: [{}]),
        **settings,
    )


def started(workers: int = 2, servers: int = 2, steps: int = 1, **settings: Any) -> Coordinator:
    """A coordinator whose members have joined and who was asked for steps."""
    coordinator = make(workers, servers, **settings)
    for worker in range(workers):
        coordinator.handle(worker_peer(worker), Message(Kind.JOIN))
    if steps:
        ask(coordinator, steps)
    return coordinator


def ask(
    coordinator: Coordinator, steps: int = 1, number: int | None = None, **meta: Any
) -> Outgoing:
    if number is None:
        number = next(REQUESTS.setdefault(coordinator, itertools.count(1)))
    meta = {"steps": steps, "stats": True, **meta}
    generation = meta.pop("generation", coordinator.generation)
    return coordinator.handle(CLIENT, Message(Kind.ASK, generation, sequence=number, meta=meta))


def report(
    coordinator: Coordinator, worker: int, *, overflowed: bool = False, **fields: Any
) -> Outgoing:
    meta = {
        "samples": 4,
        "bytes_pushed": 100,
        "bytes_pulled": 50,
        "loss": 1.0,
        "metrics": {},
        "timings": {},
    } | ({"overflowed": True} if overflowed else {})
    fields = {
        "generation": coordinator.generation,
        "version": coordinator.version,
        "total": 4.0,
        **fields,
    }
    return coordinator.handle(worker_peer(worker), Message(Kind.REPORT, meta=meta, **fields))


def staged(
    coordinator: Coordinator, server: int, meta: dict[str, Any] | None = None, **fields: Any
) -> Outgoing:
    fields = {"generation": coordinator.generation, "version": coordinator.version, **fields}
    word = Message(Kind.VERSION_STAGED, meta=meta or {"squares": 1.0}, **fields)
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


def test_a_generation_begins_when_the_last_member_joins() -> None:
    coordinator = make()
    assert coordinator.handle(worker_peer(1), Message(Kind.JOIN)) == []
    out = coordinator.handle(worker_peer(0), Message(Kind.JOIN))
    begun = [(peer, m) for peer, m in out if m.kind is Kind.MEMBERS]
    assert [str(peer) for peer, _ in begun] == ["server 0", "server 1", "worker 0", "worker 1"]
    assert all(
        Members.unpack(m) == Members(1, 0, [0, 1], reload=True, again=True) for _, m in begun
    )


def test_who_is_no_member_may_not_join() -> None:
    with pytest.raises(ProtocolError, match="worker 7"):
        make().handle(worker_peer(7), Message(Kind.JOIN))


def test_steps_asked_for_before_all_have_joined_are_granted_when_they_have() -> None:
    coordinator = make()
    coordinator.handle(worker_peer(0), Message(Kind.JOIN))
    ask(coordinator, 3)
    out = coordinator.handle(worker_peer(1), Message(Kind.JOIN))
    grants = [(peer, m) for peer, m in out if m.kind is Kind.GRANT]
    assert [peer for peer, _ in grants] == [worker_peer(0), worker_peer(1)]
    assert all(Grant.unpack(m) == Grant(1, 3, stats=True) for _, m in grants)
    assert kinds(out)[-2:] == kinds(grants)


def test_a_worker_that_joins_again_in_a_step_has_the_step_begun_anew() -> None:
    coordinator = started(steps=2)
    out = coordinator.handle(worker_peer(1), Message(Kind.JOIN, incarnation=1))
    assert coordinator.generation == 2
    assert [m.version for _, m in out if m.kind is Kind.GRANT] == [2, 2]


@pytest.mark.parametrize("last", ["worker", "server"])
def test_a_step_is_committed_when_every_server_staged_and_every_member_reported(last: str) -> None:
    coordinator = started()
    assert staged(coordinator, 0) == []
    assert report(coordinator, 1, sequence=5) == []
    if last == "worker":
        assert staged(coordinator, 1) == []
        out = report(coordinator, 0, sequence=3)
    else:
        assert report(coordinator, 0, sequence=3) == []
        out = staged(coordinator, 1)
    assert kinds(out) == [("server 0", "COMMIT"), ("server 1", "COMMIT"), ("client 0", "RESULT")]
    assert coordinator.version == 1
    commit = only(out[:1], Kind.COMMIT)
    assert (commit.version, commit.generation, commit.weight) == (1, 1, 1.0)
    assert commit.meta == {"pushes": ((0, 0, 3), (1, 0, 5)), "readers": [[0, 0], [1, 0]]}
    assert only(out, Kind.RESULT).values()["staleness"] == [0, 0]


def test_a_server_without_trainable_chunks_is_not_awaited_but_commits_too() -> None:
    coordinator = started(servers=3, holding={1})
    staged(coordinator, 1)
    report(coordinator, 0)
    assert [name for name, _ in kinds(report(coordinator, 1))] == [
        "server 0",
        "server 1",
        "server 2",
        "client 0",
    ]


def test_only_those_who_hold_chunks_count_as_having_staged() -> None:
    coordinator = started(servers=3, holding={0, 1})
    staged(coordinator, 2)
    report(coordinator, 0)
    assert report(coordinator, 1) == []
    staged(coordinator, 0)
    assert only(staged(coordinator, 1), Kind.RESULT).version == 1


def test_repeated_reports_and_stagings_count_once() -> None:
    coordinator = started()
    for _ in range(3):
        assert report(coordinator, 0) == []
        assert staged(coordinator, 0) == []
    staged(coordinator, 1)
    assert only(report(coordinator, 1), Kind.RESULT).version == 1
    assert report(coordinator, 1, version=0) == []
    assert staged(coordinator, 1, version=0) == []
    assert coordinator.version == 1


@pytest.mark.parametrize(
    "fields", [{"generation": 0}, {"generation": 2}, {"version": 1}, {"version": -1}]
)
def test_words_of_another_generation_or_version_are_ignored(fields: dict[str, int]) -> None:
    coordinator = started(workers=1, servers=1, steps=5)
    assert report(coordinator, 0, **fields) == []
    assert staged(coordinator, 0) == []
    coordinator = started(workers=1, servers=1, steps=5)
    assert staged(coordinator, 0, **fields) == []
    assert report(coordinator, 0) == []
    assert coordinator.version == 0


def test_steps_asked_for_add_up() -> None:
    coordinator = started(steps=0)
    out = ask(coordinator, 3, stats=False)
    assert kinds(out) == [("worker 0", "GRANT"), ("worker 1", "GRANT")]
    assert all(Grant.unpack(m) == Grant(1, 3, stats=False) for _, m in out)
    assert [m.version for _, m in ask(coordinator, 2)] == [5, 5]
    complete(coordinator)
    assert [m.version for _, m in ask(coordinator, 1)] == [6, 6]


def test_more_steps_than_a_version_can_count_are_refused() -> None:
    coordinator = started(steps=3)
    with pytest.raises(ProtocolError, match="ASK for .* give fewer"):
        ask(coordinator, MOST - 3)
    assert coordinator.limit == 3
    ask(coordinator, MOST - 4)
    assert coordinator.limit == MOST - 1


def test_what_was_granted_can_be_taken_back() -> None:
    coordinator = started(steps=5)
    complete(coordinator)
    out = coordinator.handle(CLIENT, Message(Kind.REVOKE, sequence=2))
    assert only(out, Kind.REVOKED).version == coordinator.limit == coordinator.version == 1
    assert report(coordinator, 0, generation=1) == []
    assert [m.version for _, m in ask(coordinator, number=3)] == [2, 2]


@pytest.mark.parametrize("nonfinite", ["refuse", "skip", "pass"])
def test_an_update_that_a_worker_wants_left_out_changes_nothing(nonfinite: str) -> None:
    """Whatever is done with NaN and infinity that no worker has spoken of."""
    coordinator = started(nonfinite=nonfinite)
    infinite = {"squares": math.inf, "culprits": [[1, "weight"]]}
    staged(coordinator, 0, infinite if nonfinite != "pass" else None)
    staged(coordinator, 1)
    report(coordinator, 0)
    out = report(coordinator, 1, overflowed=True)
    assert [m.values()["skip"] for _, m in out if m.kind is Kind.COMMIT] == [True, True]
    assert coordinator.version == 1


def test_a_model_that_raised_fails_the_step_and_the_next_can_be_taken() -> None:
    coordinator = started(steps=4)
    staged(coordinator, 0)
    report(coordinator, 0)
    about = {"error": "ValueError: no", "traceback": "..."}
    out = coordinator.handle(worker_peer(1), Message(Kind.FAILED, 1, meta=about))
    failure = only(out, Kind.FAILURE)
    assert failure.meta == {"reason": "raised", "worker": 1, "step": 0, **about}
    assert [m.values()["reload"] for _, m in out if m.kind is Kind.MEMBERS] == [True] * 4, (
        "it may have written to them"
    )
    assert (coordinator.version, coordinator.limit, coordinator.generation) == (0, 0, 2)
    assert coordinator.handle(worker_peer(0), Message(Kind.FAILED, 1, meta=about)) == []
    assert ask(coordinator, generation=1) == [], "sent before the client heard that step 1 failed"
    assert [(m.version, m.generation) for _, m in ask(coordinator)] == [(1, 2), (1, 2)]
    assert only(complete(coordinator), Kind.RESULT).version == 1


def test_a_gradient_that_is_not_finite_fails_the_step_and_each_culprit_is_named_once() -> None:
    coordinator = started()
    staged(coordinator, 0, {"squares": math.inf, "culprits": [[1, "a"], [1, "a"], [0, "b"]]})
    staged(coordinator, 1, {"squares": math.inf, "culprits": [[1, "a"]]})
    report(coordinator, 0)
    failure = only(report(coordinator, 1), Kind.FAILURE)
    assert failure.meta == {"reason": "nonfinite", "step": 0, "culprits": [(1, "a"), (0, "b")]}
    assert coordinator.version == 0
    ask(coordinator)
    assert only(complete(coordinator), Kind.RESULT).version == 1


@pytest.mark.parametrize("peer", [worker_peer(1), server_peer(1)])
def test_a_peer_lost_in_a_step_fails_it_and_every_later_one_at_once(peer: Peer) -> None:
    coordinator = started(steps=3)
    complete(coordinator)
    failure = only(coordinator.lost(peer, "reset"), Kind.FAILURE)
    assert failure.meta == {"reason": "lost", "peer": peer, "why": "reset", "step": 1}
    for _ in range(2):
        assert only(ask(coordinator), Kind.FAILURE).values()["reason"] == "lost"
        assert coordinator.limit == coordinator.version == 1


def test_a_loss_between_steps_is_told_when_the_next_is_asked_for() -> None:
    coordinator = started()
    complete(coordinator)
    assert {kind for _, kind in kinds(coordinator.lost(worker_peer(1), "reset"))} == {"MEMBERS"}
    assert only(ask(coordinator), Kind.FAILURE).values()["peer"] == ("worker", 1)


def test_a_lost_worker_that_joins_again_is_forgiven() -> None:
    coordinator = started()
    coordinator.lost(worker_peer(1), "reset")
    out = coordinator.handle(worker_peer(1), Message(Kind.JOIN, incarnation=1))
    assert {m.values()["reload"] for _, m in out if m.kind is Kind.MEMBERS} == {True}
    ask(coordinator)
    assert only(complete(coordinator), Kind.RESULT).version == 1


def test_nobody_misses_a_stranger_or_the_client() -> None:
    coordinator = started(steps=2)
    assert coordinator.lost(worker_peer(9), "reset") == []
    assert only(complete(coordinator), Kind.RESULT).version == 1  # the client is still there
    assert coordinator.lost(CLIENT, "reset") == []
    assert kinds(complete(coordinator)) == [("server 0", "COMMIT"), ("server 1", "COMMIT")]


def test_a_process_of_an_earlier_life_cannot_join() -> None:
    coordinator = started()
    coordinator.handle(worker_peer(1), Message(Kind.JOIN, incarnation=2))
    for life in (1, 2):  # of one that was given up, and a copy
        assert coordinator.handle(worker_peer(1), Message(Kind.JOIN, incarnation=life)) == []
    assert coordinator.generation == 2
    report(coordinator, 0)
    staged(coordinator, 0)
    staged(coordinator, 1)
    assert only(report(coordinator, 1, incarnation=2), Kind.RESULT).version == 1


def test_the_deadline_of_a_step_names_who_is_awaited() -> None:
    coordinator = started(workers=3, steps=2)
    assert coordinator.tick(100.0) == []
    staged(coordinator, 0)
    report(coordinator, 1)
    assert coordinator.tick(109.0) == []
    failure = only(coordinator.tick(110.0), Kind.FAILURE)
    assert failure.meta == {
        "reason": "deadline",
        "awaited": ["worker 0", "worker 2"],
        "seconds": 10.0,
        "step": 0,
    }
    assert coordinator.tick(1000.0) == []
    ask(coordinator)
    assert coordinator.tick(1001.0) == []
    assert coordinator.tick(1010.0) == []
    for worker in range(3):
        report(coordinator, worker)
    staged(coordinator, 0)
    assert only(coordinator.tick(1011.0), Kind.FAILURE).values()["awaited"] == ["server 1"]


def test_each_step_has_a_deadline_of_its_own_and_idleness_none() -> None:
    coordinator = started(steps=2)
    for now in (0.0, 9.0):
        assert coordinator.tick(now) == []
    complete(coordinator)
    assert coordinator.tick(18.0) == []
    complete(coordinator)
    assert coordinator.tick(500.0) == []
    ask(coordinator)
    assert coordinator.tick(600.0) == []
    assert only(coordinator.tick(610.0), Kind.FAILURE).values()["reason"] == "deadline"


def test_who_has_not_joined_is_awaited_too() -> None:
    coordinator = make()
    coordinator.handle(worker_peer(0), Message(Kind.JOIN))
    ask(coordinator)
    coordinator.tick(0.0)
    assert "worker 1" in only(coordinator.tick(10.0), Kind.FAILURE).values()["awaited"]


def test_a_read_lies_between_two_commits() -> None:
    coordinator = started(steps=2)
    complete(coordinator)
    out = coordinator.handle(
        Peer("client", 3), Message(Kind.READ, sequence=8, meta={"what": "state"})
    )
    assert kinds(out) == [("server 0", "SNAPSHOT"), ("server 1", "SNAPSHOT")]
    for _, message in out:
        assert (message.version, message.sequence) == (1, 8)
        assert {name: message.values()[name] for name in ("reader", "what")} == {
            "reader": ("client", 3),
            "what": "state",
        }
        assert (
            message.values()["state"]["history"]["committed"] == 1
        )  # for another coordinator to go on from


def test_installing_sets_the_version_and_reloads_everybody() -> None:
    coordinator = started()
    complete(coordinator)
    out = coordinator.handle(CLIENT, Message(Kind.INSTALL, sequence=4, version=17))
    begun = [m.values() for _, m in out if m.kind is Kind.MEMBERS]
    assert [(said["reload"], said["install"]) for said in begun] == [(True, [["client", 0, 4]])] * 4
    installed = only(out, Kind.INSTALLED)
    assert (installed.sequence, installed.version, installed.generation) == (4, 17, 2)
    assert [m.version for _, m in ask(coordinator, number=5)] == [18, 18]


def test_what_is_installed_before_all_have_joined_waits_for_them() -> None:
    coordinator = make(workers=1)
    assert coordinator.handle(CLIENT, Message(Kind.INSTALL, sequence=4, version=17)) == []
    out = coordinator.handle(worker_peer(0), Message(Kind.JOIN))
    assert only(out, Kind.INSTALLED).version == 17
    assert [m.version for _, m in ask(coordinator, number=5)] == [18]


def test_an_install_that_failed_leaves_the_version() -> None:
    coordinator = started()
    complete(coordinator)
    coordinator.lost(worker_peer(0), "reset")
    out = coordinator.handle(CLIENT, Message(Kind.INSTALL, sequence=4, version=17))
    refusal = only(out, Kind.REFUSED)
    assert Refused.unpack(refusal) == Refused(4, "reset", worker_peer(0))
    assert coordinator.version == 1


def test_a_schedule_that_raises_fails_the_step_instead_of_hanging() -> None:
    coordinator = started(steps=2, hyperparameters=lambda step: [[{}], []][step] or [{}][step])
    complete(coordinator)
    failure = only(complete(coordinator), Kind.FAILURE).values()
    assert (failure["reason"], failure["step"], failure["error"]) == (
        "schedule",
        1,
        "IndexError: list index out of range",
    )
    assert "test_coordinator.py" in failure["traceback"]
    assert coordinator.version == 1


def test_hyperparameters_travel_with_a_commit_only_where_they_changed() -> None:
    coordinator = started(steps=2, hyperparameters=lambda step: [{}, {"lr": 0.5} if step else {}])
    assert "hyper" not in only(complete(coordinator)[:1], Kind.COMMIT).values()
    assert only(complete(coordinator)[:1], Kind.COMMIT).values()["hyper"] == [{}, {"lr": 0.5}]


def test_counters_are_told_and_nonsense_refused() -> None:
    coordinator = started()
    complete(coordinator)
    counters = {
        "sequence": 3,
        "version": 1,
        "generation": 1,
        "step": 1,
        "committed": 1,
        "skipped": 0,
        "dropped": 0,
    }
    counters |= {"staleness": [(0, 2)], "following": 2, "returned": [], "paces": [], "slow": []}
    told = only(coordinator.handle(CLIENT, Message(Kind.READ_COUNTERS, sequence=3)), Kind.COUNTERS)
    assert vars(Counters.unpack(told)) == counters
    with pytest.raises(ProtocolError, match="PUSH"):
        coordinator.handle(worker_peer(0), Message(Kind.PUSH))


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
        (said(1.0, 2, 4.0, {"a": 1.0, "b": 5.0}, 0.1), 0),
        (said(3.0, 4, 8.0, {"a": 3.0}, 0.3), 2),
        (said(0.0, 0, 0.0, {}, 0.0), 1),
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
    }
    sums = {"staleness": [0, 2, 1], "samples": 6, "bytes_pushed": 30, "bytes_pulled": 15}
    assert summarize(reports, [None], False) == sums
    assert math.isnan(summarize(reports[2:], [], True)["loss"])


def test_metrics_with_weights_of_their_own_are_averaged_by_them() -> None:
    parts = [
        Measured({"a": 1.0, "b": 1.0}, 1.0, {"b": 9.0}),
        Measured({"a": 2.0, "b": 2.0}, 3.0, {"b": 1.0}),
        Measured({"a": math.nan, "b": math.nan, "c": 4.0}, 0.0, {"b": 0.0, "c": 0.0}),
    ]
    assert mean_metrics(parts) == ({"a": 1.75, "b": 1.1, "c": 4.0}, {"b": 10.0, "c": 0.0})
    reports = [
        (Report(0, 0, 0, 0, e.weight, 1, 0, 0, 1.0, {"b": e.metrics["b"]}, weights=e.weights), 0)
        for e in parts[:2]
    ]
    assert summarize(reports, [], True)["metrics"] == {"b": pytest.approx(1.1)}
    unpacked = [Report.unpack(report.pack()).weights for report, _ in reports]
    assert unpacked == [{"b": 9.0}, {"b": 1.0}]
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
            result = (CLIENT, Message(Kind.RESULT, version=self.version))
            failure = (CLIENT, Message(Kind.FAILURE, version=self.version))
            commit = (server_peer(0), Message(Kind.COMMIT))
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
        commits.append(peer) if message.kind is Kind.COMMIT else told.append(message.version)

    role = CoordinatorRole(script, send, pause=1.0)  # type: ignore[arg-type]

    def steps(count: int, kind: Kind = Kind.VERSION_STAGED) -> list[int]:
        for _ in range(count):
            role.handle(server_peer(0), Message(kind))
        return told

    assert steps(3) == [1]  # the others so soon after it wait
    assert len(commits) == 3  # which the servers' orders do not
    assert script.settled == 1  # nor are they made
    with pytest.raises(ProtocolError):  # a message that makes no sense costs no result
        role.handle(server_peer(0), Message(Kind.WEIGHTS))
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


def test_what_happened_before_the_first_tick_is_not_ages_ago() -> None:
    """The caller's clock may stand anywhere when it first tells the time."""
    coordinator = started(steps=3)
    complete(coordinator)
    assert coordinator.version == 1
    assert coordinator.tick(5000.0) == []
    assert coordinator.tick(5009.0) == []
    assert only(coordinator.tick(5010.0), Kind.FAILURE).values()["reason"] == "deadline"


def leasing() -> Coordinator:
    """A coordinator that commits each push by itself, and whose two workers have joined."""
    state = CommitState(
        members=frozenset(range(2)), servers=(0,), holding=frozenset([0]), rule=CommitEach()
    )
    job = ClosedJob(state, step_timeout=10.0, replaces=True)
    coordinator = Coordinator(job, lambda step: [{}])
    for worker in range(2):
        coordinator.handle(worker_peer(worker), Message(Kind.JOIN))
    return coordinator


def test_shares_leased_before_the_first_tick_have_all_their_time() -> None:
    coordinator = leasing()
    ask(coordinator, 3)
    assert coordinator.tick(5000.0) == []
    assert coordinator.tick(5009.0) == []
    assert only(coordinator.tick(5010.0), Kind.FAILURE).values()["reason"] == "deadline"


def test_a_successor_among_workers_that_go_on_waits_for_all_weights_before_its_first_share() -> (
    None
):
    coordinator = leasing()
    ask(coordinator, 3)
    coordinator.lost(worker_peer(1), "reset")
    out = coordinator.handle(worker_peer(1), Message(Kind.JOIN, incarnation=1))
    assert kinds(out) == [
        ("worker 1", "MEMBERS"),
        ("server 0", "WORKER_JOINED"),
        ("worker 1", "LEASE"),
    ]
    assert Members.unpack(only(out, Kind.MEMBERS)) == Members(1, 0, [0, 1], reload=True)


# -- rounds of a quorum ---------------------------------------------------------------------------


class Rounds:
    """Workers that push one after the other under a quorum; the time is told by hand."""

    def __init__(self, workers: int, quorum: int | None, grace: float, steps: int = 3) -> None:
        state = CommitState(
            members=frozenset(range(workers)),
            servers=(0,),
            holding=frozenset([0]),
            rule=CommitQuorum(quorum, grace),
            keep_log=True,
        )
        job = ClosedJob(state, step_timeout=1e9, replaces=True)
        self.coordinator = Coordinator(job, lambda step: [{}])
        self.sequences = dict.fromkeys(range(workers), 0)
        self.leases: dict[int, tuple[int, int]] = {}  # by worker: version, share
        self.commits: list[tuple[int, list[int]]] = []
        self.results: list[tuple[int, int]] = []  # step, version
        for worker in range(workers):
            self.coordinator.handle(worker_peer(worker), Message(Kind.JOIN))
        self.tell(ask(self.coordinator, steps))

    def tell(self, out: Outgoing) -> None:
        for peer, message in out:
            if message.kind is Kind.LEASE:
                self.leases[peer.index] = message.version, message.values()["share"]
            elif message.kind is Kind.COMMIT:
                pushes = [worker for worker, _, _ in message.values()["pushes"]]
                assert message.values().get("made", 1) == len(pushes)
                self.commits.append((message.version, pushes))
            elif message.kind is Kind.RESULT:
                self.results.append((message.values()["step"], message.version))

    def push(self, worker: int) -> None:
        self.sequences[worker] += 1
        version, _ = self.leases.pop(worker)
        about = {"sequence": self.sequences[worker], "version": version}
        self.tell(report(self.coordinator, worker, **about))
        word = Message(
            Kind.PUSH_STAGED,
            generation=self.coordinator.generation,
            meta={"worker": worker, "squares": 1.0},
            **about,
        )
        self.tell(self.coordinator.handle(server_peer(0), word))

    def tick(self, now: float) -> None:
        self.tell(self.coordinator.tick(now))

    @property
    def staleness(self) -> list[tuple[int, ...]]:
        page = self.coordinator._state.history.page(0)
        return [Commit.from_entry(entry).staleness for entry in page["log"]]


def test_a_round_waits_for_its_grace_and_a_late_push_is_part_of_the_next_one() -> None:
    rounds = Rounds(3, quorum=2, grace=4.0)
    rounds.tick(10.0)
    rounds.push(1)
    rounds.tick(50.0)
    assert rounds.commits == []
    rounds.push(2)
    for now in (51.0, 53.0, 54.9):  # from when the time is first told
        rounds.tick(now)
        assert rounds.commits == []
    rounds.tick(55.0)
    assert rounds.commits == [(2, [1, 2])]
    rounds.push(0)  # late
    rounds.tick(100.0)
    rounds.tick(200.0)
    assert rounds.commits == [(2, [1, 2])]
    rounds.push(2)
    rounds.tick(201.0)
    rounds.push(1)  # in time: nobody is left to wait for
    assert rounds.commits[1:] == [(5, [0, 1, 2])]
    assert rounds.staleness == [(0, 0), (2, 0, 0)]
    assert rounds.results == [(1, 3)]


def test_without_a_grace_the_quorum_is_committed_at_once() -> None:
    rounds = Rounds(3, quorum=2, grace=0.0)
    for worker in (0, 2, 2, 0, 1, 0):
        rounds.push(worker)
    assert rounds.commits == [(2, [0, 2]), (4, [0, 2]), (6, [0, 1])]
    assert rounds.results == [(1, 3), (2, 6)]


def test_the_last_round_is_of_those_that_are_left() -> None:
    rounds = Rounds(2, quorum=2, grace=0.0, steps=1)
    rounds.push(0)
    assert rounds.commits == []
    rounds.tell(rounds.coordinator.lost(worker_peer(1), "gone"))
    rounds.tick(1.0)
    assert rounds.commits == [(1, [0])]
    rounds.push(0)  # with the share of the one that is gone
    assert rounds.commits == [(1, [0]), (2, [0])]
    assert rounds.results == [(1, 2)]


def test_a_grace_ends_with_its_generation() -> None:
    rounds = Rounds(3, quorum=2, grace=4.0)
    rounds.tick(1.0)
    rounds.push(0)
    rounds.push(1)
    rounds.tick(2.0)
    rounds.tell(rounds.coordinator.handle(CLIENT, Message(Kind.REVOKE, sequence=50)))
    rounds.tick(100.0)
    rounds.tell(ask(rounds.coordinator, 1, number=51))
    rounds.sequences = dict.fromkeys(range(3), 5)
    rounds.push(2)
    rounds.push(1)
    rounds.tick(101.0)
    assert rounds.commits == []
    rounds.tick(105.0)
    assert rounds.commits == [(2, [1, 2])]
