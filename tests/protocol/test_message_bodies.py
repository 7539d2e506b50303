"""The bodies of messages: each kind has one, and what is said arrives as it was said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode
from msgspec.structs import replace

from steepest.core.messages import driver, gradients, membership, snapshots, users
from steepest.core.messages.audits import Audited, GradientDigest
from steepest.core.messages.fields import StepDigest
from steepest.core.messages.message import Kind, Message, MessageKind, Peer, PushId
from steepest.core.messages.permissions import TRAINING, MessageCheck
from steepest.core.messages.schema import Body, body
from steepest.core.messages.users import OPEN
from steepest.errors import ProtocolError
from steepest.strategies.collectives import messages as collective
from steepest.strategies.collectives.messages import MEMBERS
from steepest.tables.job import row_messages as rows
from steepest.tables.job.row_messages import LINES
from tests.fuzzing import carried

PUSHES = (PushId(0, 0, 7), PushId(2, 1, 9))
READERS = [(0, 0), (2, 5)]
CULPRITS = [(1, "weight"), (-1, "bias")]
STATE = {
    "ledger": [7, 3],
    "history": {"committed": 3, "skipped": 1, "dropped": 0, "staleness": [(0, 6)]},
}
TENSOR = (4, 1, "weight", "exp_avg", 0, 8, False, "float32", [8])
DIGEST = GradientDigest(7, 8, (1, 2), (0.5, 0.25), (0.5, math.inf))
SAID: list[Body] = [
    gradients.Push(1, 2, 3, 4, 1, 0.5, 8.0, [2]),
    gradients.Push(1, 2, 3, 4, 1),
    gradients.HostPush(1, 4, 1, 0.5, 8.0, PUSHES, [2]),
    gradients.VersionStaged(1, 4, 2.5, CULPRITS),
    gradients.VersionStaged(1, 4, 2.5),
    gradients.PushStaged(1, 2, 3, 4, 0, 2.5, CULPRITS),
    gradients.Report(1, 2, 3, 4, 8.0, 16, 100, 200, 0.25, {"error": 1.5}, {"compute": 0.5}),
    gradients.Report(1, 2, 3, 4, 8.0, 16, 100, 200),
    gradients.Report(
        1, 2, 3, 4, 8.0, 16, 9, 9, hyper=[{"betas": (0.9, 0.5)}], digest=StepDigest(0, 3, 1, 0)
    ),
    gradients.Report(1, 2, 3, 4, 8.0, 16, 9, 9, audit=Audited("cpu", 0.01, 2, DIGEST, DIGEST)),
    gradients.CommitOrder(
        1,
        4,
        0.5,
        PUSHES,
        READERS,
        [{"lr": 0.1}, {}],
        True,
        0.5,
        [4, []],
        number=3,
        state=STATE,
        schedule={},
    ),
    gradients.CommitOrder(1, 4, 1.0, (), []),
    gradients.Discard(1, 4, PUSHES, READERS),
    gradients.Refresh(1, 4, READERS),
    gradients.Logged(1, 4),
    gradients.Weights(1, 3, 4, 1, True),
    gradients.WeightsShared(1),
    membership.Join(2),
    membership.Members(1, 4, [0, 2], True, [("client", 0, 5)], True),
    membership.WorkerJoined(1, 4, 2),
    membership.WorkerEnded(1, 4, 2, 1, PUSHES),
    membership.Grant(1, 9, stats=False),
    membership.Grant(1, 9, rates=[(4, [0.5, 0.25]), (7, None)]),
    membership.Lease(1, 4, 7, False, 3),
    membership.Failed(1, 2, 4, "ValueError: no", "Traceback", "ModelError"),
    membership.GroupKey(3, "0/1", "00ff"),
    driver.AskForSteps(2, 5, 10, stats=False),
    driver.AskForSteps(2, 5, 10, rates=[(4, [0.5]), (7, None)]),
    driver.Result(1, 4, 2, 16, 100, 200, [0, 1], 0.25, {"error": 1.5}, {"compute": 0.5}, 2.5),
    driver.Failure(1, 4, 2, "lost", peer=Peer("server", 1), why="killed"),
    driver.Failure(1, 4, 2, "unlike", why="workers disagree about lr"),
    driver.Failure(1, 4, 2, "deadline", awaited=["worker 1"], seconds=10.0),
    driver.Revoke(5),
    driver.Revoked(1, 5, 4),
    driver.Stop(5),
    driver.Stopped(1, 5, 9),
    driver.GiveUp(2, 1, "silent"),
    driver.WorkerLost(1, 4, 2, 1, "silent"),
    driver.AuditDifference(
        1, 4, 5, [(0, 2), (2, 2)], "not the same result twice", 2, 1, waits=True
    ),
    driver.ReadCounters(5),
    driver.Counters(1, 5, 4, 2, 4, 0, 1, [(0, 6)], 8, [3], [(0, 0.5)], [(2, 1)]),
    driver.ReadLog(5, 100),
    driver.LogPage(5, [[1, []]], 7),
    driver.LogPage(5, None),
    snapshots.Read(5, "state", [0, 1], at=7),
    snapshots.Snapshot(1, 5, 4, Peer("client", 3), "opaque", [1], state=STATE),
    snapshots.ReadOn(5),
    snapshots.StateTensor(*TENSOR),
    snapshots.SnapshotEnd(1, 5, 4, STATE),
    snapshots.Put(5, 2, 1),
    snapshots.PutState(*TENSOR, number=3),
    snapshots.ReplaceState(5, 3),
    snapshots.PutReceived(5, 3),
    snapshots.Install(5, 17, True, STATE),
    snapshots.Installed(1, 5, 17),
    snapshots.Refused(5, "killed", Peer("worker", 1)),
    snapshots.Refused(5, "no such chunk"),
    snapshots.InstallPut(1, 4, [("client", 0, 5)]),
    users.Pushed(3, 4, pull=True),
    users.PushCommitted(3, 5),
    users.PushRefused(3, CULPRITS),
    users.UserLeft(100),
    rows.PullRows(1, 7, 4, [(2, 5, True)]),
    rows.Rows(1, 7, 4, "a table is full"),
    collective.Data(1, 3, 2, True),
    collective.Connected(),
    collective.Abort(1, 2, "a member died"),
    collective.Part(4, 1, 2, 0),
]


def test_each_kind_has_a_body() -> None:
    assert {said.KIND for said in SAID} == {*Kind, *rows.RowKind, *collective.MemberKind}
    assert {line[0] for line in (*TRAINING, *OPEN, *MEMBERS, *LINES)} == {
        *Kind,
        *rows.RowKind,
        *collective.MemberKind,
    }


def test_kinds_have_numbers_of_their_own() -> None:
    class Another(MessageKind):
        TAKEN = 51

    class Taken(Body, frozen=True):
        """Has no fields."""

    with pytest.raises(AssertionError, match="PULL_ROWS|TAKEN"):
        body(Another.TAKEN)(Taken)


@pytest.mark.parametrize("said", SAID, ids=lambda said: type(said).__name__)
def test_what_is_said_is_what_is_read(said: Body) -> None:
    for table in (TRAINING, OPEN, MEMBERS, LINES):
        for kind, source, target in table:
            if kind is not said.KIND or (table is OPEN and kind is Kind.PUSH):
                continue
            message = said.pack()
            message.source, message.target = Peer(source, 0), Peer(target, 0)
            arrived = carried(message)
            assert arrived is not None
            MessageCheck(table).check(arrived)
            assert isinstance(arrived.body, type(said))
            assert encode(arrived.body) == encode(said)
            assert message.body is said


#: What dense models' messages may say of tables, and what may not even be said where there are tables.
ABOUT_ROWS = [
    (gradients.Report(1, 2, 3, 4, 8.0, 8, 0, 0, more=rows.RowsOfPush([(2, 3)], True)), ([(2, -3)], True)),
    (snapshots.Read(5, "opaque", options=rows.RowsToRead(2)), ["2", [], 0]),
    (snapshots.Read(5, "state", options=rows.RowsToRead(since=[(1, 9, 4)])), [None, [[1, 9]], 0]),
    (snapshots.Read(5, "state", options=rows.RowsToRead(since=[(1, 9, 4)])), [None, [], 0, 1]),
    (snapshots.Snapshot(1, 5, 4, Peer("client", 3), "opaque", options=rows.RowsToRead(2)), [-2, [], 0]),
]  # fmt: skip


@pytest.mark.parametrize(("said", "wrong"), ABOUT_ROWS)
def test_rows_are_spoken_of_where_a_job_has_tables(said: Body, wrong: Any) -> None:
    (line,) = (line for line in TRAINING if line[0] is said.KIND)
    message = said.pack()
    message.source, message.target = Peer(line[1], 0), Peer(line[2], 0)
    MessageCheck({**TRAINING, **LINES}).check(arrived(message))
    with pytest.raises(ProtocolError, match="null, as nothing is attached"):
        MessageCheck(TRAINING).check(arrived(message))
    name = "more" if hasattr(said, "more") else "options"
    message.body = replace(said, **{name: wrong})
    with pytest.raises(ProtocolError, match=f"{name}=.*: give "):
        MessageCheck({**TRAINING, **LINES}).check(arrived(message))


def arrived(message: Message) -> Message:
    """A message as it comes to another process."""
    found = carried(message)
    assert found is not None
    return found


def test_text_that_utf_8_does_not_have_travels_in_escapes() -> None:
    error, name = "no \ud800 here", "\udc00"
    failed = membership.Failed(1, 2, 4, error, "Traceback").pack()
    report = gradients.Report(1, 2, 3, 4, 8.0, 16, 9, 9, metrics={name: np.float64(0.5)}).pack()
    for message, found in ((failed, r"no \ud800 here"), (report, {r"\udc00": 0.5})):
        message.source, message.target = Peer("worker", 0), Peer("coordinator", 0)
        MessageCheck().check(there := arrived(message))
        assert found in (getattr(there.body, "error", None), getattr(there.body, "metrics", None))


def test_a_body_stays_as_it_is() -> None:
    said = membership.Grant(1, 9)
    with pytest.raises(AttributeError):
        said.limit = 10  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del said.limit
    assert replace(said, limit=10) == membership.Grant(1, 10)
    with pytest.raises(TypeError, match="limit"):
        membership.Grant(1)  # type: ignore[call-arg]


def test_bodies_of_one_kind_and_equal_fields_are_equal() -> None:
    said = gradients.Weights(1, 3, 4, 1)
    assert said == replace(said) != replace(said, chunk=2)
    assert driver.Stop(5) != driver.Revoke(5)
    assert repr(membership.Grant(1, 9)) == "Grant(generation=1, limit=9, stats=True, rates=())"


def test_a_field_that_is_wrong_is_named_with_its_value_and_what_is_allowed() -> None:
    message = membership.Grant(1, -1).pack()
    message.source, message.target = Peer("coordinator", 0), Peer("worker", 0)
    with pytest.raises(
        ProtocolError, match="GRANT from coordinator with limit=-1: give `int` >= 0"
    ):
        MessageCheck().check(arrived(message))
