"""Messages about rows that no worker and no client would send: each is refused, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from steepest.core.messages.message import Kind, Message
from steepest.core.tensors.memory import as_tensor, clone
from steepest.errors import ConfigurationError
from steepest.tables.job.job_tables import dealing_of
from steepest.tables.job.restored_shards import MADE
from steepest.tables.job.row_messages import RowKind
from steepest.tables.rows.gradients import RowGradients, pack_keys, unpack_keys
from steepest.tables.rows.hashing import shard_of
from steepest.tables.rows.push_form import Chance, PushForm
from steepest.tables.rows.spread import Spread
from steepest.testing import InProcessCluster
from tests.fuzzing import processes
from tests.modes import make, trained
from tests.reference import same_bits
from tests.said import with_fields
from tests.table_tasks import rows_of, same_rows, table_task

STEPS = 3
USERS = (2, 3)  # the chunks that are shards of the table of users
Change = Callable[[RowGradients], RowGradients]


def changed(rows: RowGradients, **arrays: Any) -> RowGradients:
    """The same with one item of some arrays set."""
    return replace(
        rows, **{name: np.concatenate([[v], getattr(rows, name)[1:]]) for name, v in arrays.items()}
    )


def twice(rows: RowGradients) -> RowGradients:
    return rows.taken(np.arange(len(rows) + 1) % len(rows))


TWO = Spread.evenly(2, 2)  # shards of each group


def of_another_shard(rows: RowGradients) -> RowGradients:
    (own,) = set(shard_of(rows.tables, rows.ids, TWO).tolist())
    ids = np.arange(100, 200)
    other = ids[shard_of(np.zeros(100, np.int32), ids, TWO) != own][0]
    return changed(rows, ids=other)


PUSHES: dict[str, Change] = {
    "an id twice": twice,
    "an id of another shard": of_another_shard,
    "a negative id": lambda rows: changed(rows, ids=-1),
    "a table too many": lambda rows: changed(rows, tables=np.int32(1)),
    "a negative table": lambda rows: changed(rows, tables=np.int32(-1)),
    "no sightings": lambda rows: changed(rows, sightings=np.int32(0)),
    "negative sightings": lambda rows: changed(rows, sightings=np.int32(-(2**31))),
}


def job(name: str, servers: int = 2) -> InProcessCluster:
    return make(name, table_task(), workers=2, servers=servers)


@cache
def in_peace(name: str, servers: int) -> dict[str, torch.Tensor]:
    """The rows after all steps, if nobody says anything wrong."""
    cluster = job(name, servers)
    trained(cluster, STEPS)
    return rows_of(cluster)


@cache
def form() -> PushForm:
    """How the job's pushes of rows look."""
    dealing = dealing_of(job("sync").job)
    assert dealing is not None
    return dealing.push_form


def refused(cluster: InProcessCluster) -> int:
    """The messages that all processes have refused."""
    return sum(process.refused() for process in processes(cluster.network))


class Beside:
    """Sends one wrong message in front of the first right one that it can be made of."""

    def __init__(self, cluster: InProcessCluster, wrong: Callable[[Message], Message | None]):
        self.done = False
        self._wrong = wrong
        cluster.network.filter = self

    def __call__(self, message: Message) -> Sequence[Message]:
        found = None if self.done else self._wrong(message)
        self.done |= found is not None
        return [message] if found is None else [found, message]


def pushed(change: Change) -> Callable[[Message], Message | None]:
    """Makes a wrong push of one with rows of the first group of tables."""

    def wrong(message: Message) -> Message | None:
        if (
            message.kind is not Kind.PUSH
            or message.payload is None
            or message.body.chunk not in USERS
        ):
            return None
        found = replace(message)
        rows, *others = form().unpack(as_tensor(clone(message.payload)).numpy())
        packed = form().pack(
            [change(rows), *others], lambda size: np.empty(size, np.uint8), Chance(0, 0)
        )
        found.payload = torch.from_numpy(packed)
        return found

    return wrong


def unharmed(
    name: str,
    wrong: Callable[[Message], Message | None],
    caplog: pytest.LogCaptureFixture,
    servers: int = 2,
) -> None:
    """A wrong message is refused, and the job trains as without it."""
    cluster = job(name, servers)
    beside = Beside(cluster, wrong)
    trained(cluster, STEPS)
    assert beside.done
    assert refused(cluster) == 1
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert same_rows(rows_of(cluster), in_peace(name, servers))


Keys = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
MANY = np.zeros(20, np.int32), np.arange(20)
BY_SHARD = np.argsort(shard_of(*MANY, TWO), kind="stable")

PULLS: dict[str, Callable[[Keys], Keys]] = {
    "keys in another order than their shards": lambda keys: (MANY[0], MANY[1][BY_SHARD[::-1]]),
    "a negative id": lambda keys: (keys[0], np.concatenate([[-1], keys[1][1:]])),
    "a table too many": lambda keys: (keys[0] + np.int32(1), keys[1]),
    "a negative table": lambda keys: (keys[0] - np.int32(1), keys[1]),
}


def pulled(
    change: Callable[[Keys], Keys] = lambda keys: keys, **header: Any
) -> Callable[[Message], Message | None]:
    """Makes a wrong pull of one of the first group of tables."""

    def wrong(message: Message) -> Message | None:
        if message.kind is not RowKind.PULL_ROWS or message.body.lookups[0][0] != 0:
            return None
        count = message.body.lookups[0][1]
        tables, ids = unpack_keys(as_tensor(clone(message.payload)).numpy())
        tables, ids = change((tables[:count], ids[:count]))
        lookups, sequence = [(0, len(ids), True)], message.body.sequence + 1000
        found = with_fields(message, **{"lookups": lookups, "sequence": sequence, **header})
        found.payload = torch.from_numpy(pack_keys([(np.sort(tables), ids)]))
        return found

    return wrong


def without_a_byte(message: Message) -> Message | None:
    found = pulled()(message)
    if found is not None:
        found.payload = found.payload[1:]
    return found


def of_group(group: int) -> Callable[[Message], Message | None]:
    def wrong(message: Message) -> Message | None:
        if (found := pulled()(message)) is not None:
            return with_fields(found, lookups=[(group, *found.body.lookups[0][1:])])
        return found

    return wrong


@pytest.mark.parametrize("what", PULLS)
@pytest.mark.parametrize("version", [0, 2])
def test_a_wrong_pull_is_refused_when_it_comes(
    what: str, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    unharmed("sync", pulled(PULLS[what], version=version), caplog, servers=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("wrong", [without_a_byte, of_group(2), of_group(2**31)])
def test_a_pull_of_what_is_not_there_is_refused(
    wrong: Callable[[Message], Message | None], caplog: pytest.LogCaptureFixture
) -> None:
    unharmed("sync", wrong, caplog)


def test_a_pull_of_another_servers_rows_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    for version in (0, 2):
        wrong = pulled(lambda keys: (MANY[0], MANY[1][BY_SHARD]), version=version)
        unharmed("sync", wrong, caplog)


@pytest.mark.few(3)
@pytest.mark.long
@pytest.mark.parametrize("what", PUSHES)
def test_a_wrong_push_is_refused(what: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("sync", "copies", "allreduce") if what == "an id twice" else ("sync",):
        unharmed(name, pushed(PUSHES[what]), caplog)


def test_gradients_that_overflow_are_infinite() -> None:
    """A weight that is no float32, say, warns nobody: the check for infinity finds it."""
    ids = np.arange(2)
    ones = np.ones((2, 3), np.float32)
    rows = RowGradients(np.zeros(2, np.int32), ids, ones, np.ones(2, np.int32))
    for factor in (1e30, 1e100):
        assert np.isinf(rows.times(1e30).times(factor).gradients).all()


@pytest.mark.parametrize("key", ["ids", MADE])
def test_rows_that_a_client_puts_are_refused(key: str) -> None:
    """They come from files alone, and as what the server's process has made of these."""
    cluster = job("sync")
    trained(cluster, STEPS)
    before, weights = rows_of(cluster), cluster.weights()
    snapshot = cluster.snapshot("state")
    chunk, about, _ = next(each for each in snapshot.records if each[0] in USERS)
    wrong = chunk, {**about, "key": key, "start": 0, "stop": 1}, torch.tensor([3])
    zeros = torch.zeros_like(snapshot.weights)
    installing = cluster.client.install(STEPS, zeros, [wrong], None)
    with pytest.raises(ConfigurationError, match="nothing of which is installed: "):
        cluster.wait(installing, "an install")
    assert refused(cluster) > 0
    assert same_rows(rows_of(cluster), before)
    assert same_bits(cluster.weights(), weights)
    trained(cluster, STEPS)
