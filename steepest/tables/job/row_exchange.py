"""A worker's exchange of rows of embedding tables with servers, in the middle of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from steepest.core.engine.exchange import WaitUntil
from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.incoming_weights import where_lent
from steepest.core.engine.sample_places import Place
from steepest.core.engine.topology import Topology
from steepest.core.messages.message import Message, Peer, Send, server_peer
from steepest.core.tensors.dtypes import Tensors
from steepest.errors import ConfigurationError, ProtocolError, listed
from steepest.tables.job.delayed_rows import DelayedRows
from steepest.tables.job.row_collector import RowCollector
from steepest.tables.job.row_messages import ROW_MEMORY, PullRows, Rows, RowsOfPush
from steepest.tables.modules.id_places import IdPlaces, Searched
from steepest.tables.rows.dealing import Dealing, Where
from steepest.tables.rows.gradients import aligned, pack_keys
from steepest.tables.rows.hashing import Distinct
from steepest.tables.rows.kernels import Floats, Int32s, Int64s
from steepest.tables.rows.push_form import Chance

_NOT_SENT = "rows of embedding tables were not sent"
_MOST_AWAITED = 32  # requests, above which no batch is looked at beforehand
_REQUESTS_BITS = 29  # of a life; with the bits of an incarnation a sequence has at most 61


class _KeysOfLookUp(NamedTuple):
    """The keys of one look-up: `tables` and `ids`, (n,) each, may repeat; `keys` are distinct."""

    group: int
    tables: Int32s
    ids: Int64s
    keys: Distinct


@dataclass(eq=False)
class _AskedRows:
    """Rows of a group of tables that servers were asked for, of one look-up or several."""

    group: int
    tables: Int32s
    ids: Int64s
    training: bool
    # by request, which of the rows, and their bytes in the answer
    parts: list[tuple[int, Where, slice]] = field(default_factory=list)
    values: Floats | None = None  # all of them, once they have come


class _AskedLookUp(NamedTuple):
    """A look-up whose rows were asked for."""

    rows: _AskedRows
    part: slice  # of them
    wanted: _KeysOfLookUp | None = None  # where a batch was looked at beforehand


class RowExchange(RowCollector):
    """The rows that one worker's models use: pulled from servers, their gradients collected.

    Args:
        worker: its index, for errors.
        dealing: of tables into chunks.
        topology: of the job; of a chunk's servers the first answers.
        send: sends as the worker.
    """

    def __init__(self, worker: int, dealing: Dealing, topology: Topology, send: Send) -> None:
        super().__init__(dealing, topology.pushed)
        # receives messages in the middle of a forward pass; None before `begin_life`
        self.wait_until: WaitUntil | None = None
        self.position = (0, 0)  # generation and version of the weights with which models compute
        self.bytes_pulled = 0
        self._worker = worker
        self._send = send
        self._sequence = 0
        self._forms = [group[0].form for group in dealing.groups]
        self._awaited: dict[int, int] = {}  # by request, the server
        self._answers: dict[int, tuple[Rows, Any]] = {}  # with their payloads
        self.places = IdPlaces()  # of the models' batches
        self.delayed = DelayedRows(self)  # the gradients that are kept for the next step
        # of the answers that the present gradient is computed with, in their order
        self.versions: list[int] = []
        self._done = 0  # look-ups of the present batch
        self._searched: Searched | None = None  # for their ids
        self._looked: dict[
            Place, dict[int, _AskedLookUp]
        ] = {}  # look-ups by their number in a batch
        self._coming: dict[int, _AskedLookUp] = {}  # those of the present batch
        self._servers = np.array(  # by group and shard
            [
                [
                    topology.holders[dealing.chunk(group, shard)][0]
                    for shard in range(dealing.num_shards)
                ]
                for group in range(len(dealing.groups))
            ]
        )

    def begin_life(self, incarnation: int, wait_until: WaitUntil) -> None:
        """Begin to pull rows, with other numbers of requests than in other lives of the worker.

        A server may answer a dead worker's request on its successor's channel.

        Args:
            wait_until: receives messages in the middle of a forward pass.
        """
        self._sequence, self.wait_until = incarnation << _REQUESTS_BITS, wait_until

    def pull(self, group: int, tables: Int32s, ids: Int64s, training: bool = True) -> Floats:
        """Return the values of distinct rows, (n, dim), as servers have them; waits for the answers.

        Args:
            training: whether their gradients will be pushed.

        Raises:
            ConfigurationError: a table has no room for a row of each id, or the models are not in a process
                of a job.
        """
        if self.wait_until is None or self.position[1] < 0:  # or before the first weights
            raise ConfigurationError(
                "rows of embedding tables were looked up outside of a job's steps: look them up in the forward pass "
                "of a step or of evaluate(), or give the module rows of its own by steepest.connect(module)"
            )
        at, self._done = self._done, self._done + 1
        asked = self._coming.get(at)
        was_right = asked is not None and _is_same(asked, group, tables, ids, training)
        self.places.note(at, training=training, was_right=asked is None or was_right)
        if asked is None or not was_right:
            rows = _AskedRows(group, tables, ids, training)
            self._ask([rows])
            asked = _AskedLookUp(rows, slice(0, len(ids)))
        try:
            if not self._has_come(asked.rows):
                self.wait_until(partial(self._has_come, asked.rows), _NOT_SENT)
            return self._values(asked)
        finally:
            if not was_right:
                self._forget(asked)

    def distinct(self, group: int, tables: Int32s, ids: Int64s) -> Distinct:
        """Return the distinct ones of the (table, id) of a batch, perhaps found beforehand."""
        if (asked := self._coming.get(self._done)) is not None and (known := asked.wanted):
            same = np.array_equal(known.ids, ids) and np.array_equal(known.tables, tables)
            if same and known.group == group:
                return known.keys
        if self._searched is not None and self.places.is_sought(self._done):
            self.places.find(self._done, group, tables, ids, self._searched())
        return super().distinct(group, tables, ids)

    def _empty(self, group: int, count: int) -> Floats:
        form = self._forms[group]
        return np.empty((count, form.dim), form.dtype)

    def _values(self, asked: _AskedLookUp) -> Floats:
        """Return the rows of a look-up, of which all answers are here."""
        rows, part = asked.rows, asked.part
        whole, values = rows.values is None, rows.values
        if values is None:
            values = self._empty(rows.group, len(rows.ids))
        for request, where, sent in rows.parts:
            answer, payload = self._answers[request]
            if answer.refused:
                raise ConfigurationError(answer.refused)
            if _has_some(where, part):
                self.versions.append(answer.version)
            if whole:
                assert payload is not None
                packed = payload.numpy()[sent]
                self.bytes_pulled += len(packed)
                arrived = self._forms[rows.group].received(packed)
                if isinstance(where, slice):
                    values = arrived
                else:
                    values[where] = arrived
        rows.values = values
        mine: Floats = values[part]
        return mine

    def begin(self, generation: int, version: int) -> None:
        """Begin a gradient, computed from the weights of a generation and version."""
        self.clear()
        self.versions = []
        self.position = (generation, version)
        self.delayed.begin(version)

    def begin_share(self, ready: ChunkReady) -> None:
        """Push the gradients of the step before, where they are delayed."""
        self.delayed.begin_share(ready)

    def end_share(self, ready: ChunkReady, updates: int = 1) -> None:
        """Push the gradients of all batches, or keep them for the next step."""
        self.delayed.end_share(self.gradients(), *self.weights(updates), ready)

    def chance(self) -> Chance:
        """Return the worker's chance at the version of the weights."""
        return Chance(self._worker, self.position[1])

    def unpushed(self, step: int) -> Tensors:
        """Return the gradient that no update contains; if gradients are delayed, a step is a version."""
        return self.delayed.state(step)

    def push_later(self, gradient: Mapping[str, torch.Tensor]) -> None:
        """Push what `unpushed` returned with the next step, and nothing kept before."""
        self.delayed.load_state(gradient)

    def logged(self) -> Sequence[Any]:
        """Return the log's entry for the rows of the present gradient, see `RowsOfPush`; empty if there is none."""
        runs: list[tuple[int, int]] = []
        if any(version != self.position[1] for version in self.versions):
            runs = [(len(list(same)), version) for version, same in groupby(self.versions)]
        own = self.delayed.delays and self.delayed.is_last
        return RowsOfPush(runs, own) if runs or own else ()

    def look(self, place: Place, batch: Any, *, later: bool) -> None:
        """Ask for the rows of a batch that is computed later, as far as it shows which, and do not wait for them.

        Args:
            batch: what is searched for ids.
            later: rows are to be of the version after `position`'s.
        """
        if len(self._awaited) >= _MOST_AWAITED:
            return
        wanted: dict[int, _KeysOfLookUp] = {}
        together: dict[tuple[int, bool], list[int]] = {}  # look-ups that are asked for as one
        for at, known in enumerate(self.places.known):
            if known is not None and (keys := known.ids(batch)) is not None:
                distinct = super().distinct(known.group, *keys)
                wanted[at] = _KeysOfLookUp(known.group, *keys, distinct)
                together.setdefault((known.group, known.training), []).append(at)
        looked, asked = self._looked.setdefault(place, {}), []
        for (group, training), numbers in together.items():
            each = [wanted[at].keys for at in numbers]
            tables = [keys.tables for keys in each]
            ids = [keys.ids for keys in each]
            rows = _AskedRows(group, _one(tables), _one(ids), training)
            asked.append(rows)
            begin = 0
            for at, looked_up in zip(numbers, each, strict=True):
                end = begin + len(looked_up.ids)
                looked[at] = _AskedLookUp(rows, slice(begin, end), wanted[at])
                begin = end
        self._ask(asked, int(later))

    def begin_batch(self, place: Place, searched: Searched | None = None) -> None:
        """Begin the forward pass over a batch, whose rows may have been asked for already.

        Args:
            searched: returns what is to be searched for the batch's ids; None to search nothing.
        """
        self._coming, self._searched, self._done = self._looked.pop(place, {}), searched, 0

    def end_batch(self, weight: float) -> None:
        """Note that a batch is computed, and its weight."""
        super().end_batch(weight)
        self.places.end(self._done)
        self._end_coming()

    def _end_coming(self) -> None:
        """Forget the rows that were asked for for the present batch."""
        self._forget(*self._coming.values())
        self._coming, self._searched = {}, None

    def forget_looked_at(self) -> None:
        """Forget the rows of batches that were asked for beforehand: they may be of old versions."""
        self._forget(*(asked for looked in self._looked.values() for asked in looked.values()))
        self._looked.clear()
        self._end_coming()

    def _forget(self, *lookups: _AskedLookUp) -> None:
        for asked in lookups:
            for request, _, _ in asked.rows.parts:
                self._awaited.pop(request, None)
                self._answers.pop(request, None)

    def _ask(self, wanted: Sequence[_AskedRows], later: int = 0) -> None:
        """Ask servers for rows: each for all of them at once; `later`: versions after the present one."""
        messages: dict[int, _RowRequest] = {}  # by server
        for asked in wanted:
            owners, form = self._servers[asked.group], self._forms[asked.group]
            parts = self.dealing.parts(asked.group, asked.tables, asked.ids, owners)
            for server, where in parts.items():
                if server not in messages:
                    self._sequence += 1
                    messages[server] = _RowRequest(self._sequence, [], [])
                request = messages[server]
                tables, ids = asked.tables[where], asked.ids[where]
                begin, size = request.nbytes, len(ids) * form.sent_bytes
                request.lookups.append((asked.group, len(ids), asked.training))
                request.keys.append((tables, ids))
                request.nbytes += aligned(size)
                asked.parts.append((request.sequence, where, slice(begin, begin + size)))
        generation, version = self.position
        for server, request in messages.items():
            self._awaited[request.sequence] = server
            keys = torch.from_numpy(pack_keys(request.keys, ROW_MEMORY.empty))
            place = generation, request.sequence, version + later
            self._send(server_peer(server), PullRows(*place, request.lookups).pack(keys))

    def _has_come(self, asked: _AskedRows) -> bool:
        return all(request in self._answers for request, _, _ in asked.parts)

    def lacks(self) -> list[str]:
        """Name the servers that have not sent rows that they were asked for."""
        asked = dict(self._awaited)
        servers = {server for request, server in asked.items() if request not in self._answers}
        return [f"rows of {listed(map(server_peer, sorted(servers)))}"] if servers else []

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return the memory for arriving rows; None to drop rows that no look-up awaits."""
        return where_lent(message, size) if message.body.sequence in self._awaited else None

    def receive(self, source: Peer, message: Message) -> None:
        """Take the answer of a server; a late one, or a copy, is dropped.

        Raises:
            ProtocolError: another server was asked.
        """
        rows: Rows = message.body
        if rows.sequence not in self._awaited:
            return
        if source.index != self._awaited[rows.sequence]:
            raise ProtocolError(f"{source} answers what worker {self._worker} has asked another")
        self._answers[rows.sequence] = rows, message.payload


@dataclass
class _RowRequest:
    """A request to one server, in one message."""

    sequence: int
    lookups: list[tuple[int, int, bool]]
    keys: list[tuple[Int32s, Int64s]]
    nbytes: int = 0  # of the answer


def _is_same(asked: _AskedLookUp, group: int, tables: Int32s, ids: Int64s, training: bool) -> bool:
    """Return whether a look-up that was made beforehand is for the same rows."""
    if (asked.rows.group, asked.rows.training) != (group, training):
        return False
    if asked.wanted is not None and asked.wanted.keys.ids is ids:
        return True
    mine = asked.rows.ids[asked.part], asked.rows.tables[asked.part]
    return np.array_equal(mine[0], ids) and np.array_equal(mine[1], tables)


def _one(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return arrays one after another."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _has_some(where: Where, part: slice) -> bool:
    """Return whether some of the places `where` are in a part."""
    if isinstance(where, slice):
        return bool(part.start < part.stop)
    return bool(((where >= part.start) & (where < part.stop)).any())
