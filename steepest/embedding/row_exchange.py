"""A worker's exchange of rows of embedding tables with servers, in the middle of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from steepest.core.engine.exchange import WaitUntil
from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.incoming_weights import where_lent
from steepest.core.engine.sample_places import Place
from steepest.core.engine.topology import Topology
from steepest.core.messages.message import Message, Peer, Send, server_peer
from steepest.core.tensors.dtypes import Tensors
from steepest.embedding.delayed_rows import DelayedRows
from steepest.embedding.row_collector import RowCollector
from steepest.embedding.row_messages import ROW_MEMORY, PullRows, Rows, RowsOfPush
from steepest.errors import ConfigurationError, ProtocolError, listed
from steepest.tables.dealing import Dealing, Where
from steepest.tables.gradients import pack_keys
from steepest.tables.hashing import Distinct
from steepest.tables.kernels import Floats, Int32s, Int64s

_NOT_SENT = "rows of embedding tables were not sent"
_MOST_AWAITED = 32  # requests, above which no batch is looked at beforehand
_REQUESTS_BITS = 29  # of a life; with the bits of an incarnation a sequence has at most 61


class _BatchKeys(NamedTuple):
    """The keys of one look-up in a batch: `tables` and `ids`, (n,) each, may repeat; `keys` are distinct."""

    tables: Int32s
    ids: Int64s
    keys: Distinct


class _AskedRows(NamedTuple):
    """A look-up of some keys of a group of tables that servers were asked for."""

    group: int
    tables: Int32s
    ids: Int64s
    parts: list[tuple[int, Where]]  # by request
    batch: _BatchKeys | None = None


class _LookedError(BaseException):
    """A forward pass has come to its last look-up; raised through the model's code."""


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
        self._answers: dict[int, Rows] = {}
        self.lookups = self._done = 0  # of the last batch, each of one group of tables
        self.delayed = DelayedRows(self)  # the gradients that are kept for the next step
        # of the answers that the present gradient is computed with, in their order
        self.versions: list[int] = []
        self._looking: list[_AskedRows] | None = None  # the look-ups of a pass that only asks
        self._later = 0  # versions after the present one, of which its rows are to be
        self._looked: dict[Place, list[_AskedRows]] = {}
        self._coming: list[_AskedRows] = []  # the look-ups of the present batch, in order
        self._batch_looked_at: _BatchKeys | None = None  # of the present look-up
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
            raise ConfigurationError("rows of embedding tables are pulled while a job runs")
        if self._looking is not None:
            asked = self._ask(group, tables, ids, True)
            self._looking.append(asked._replace(batch=self._batch_looked_at))
            if len(self._looking) == self.lookups:
                raise _LookedError
            return np.zeros_like(self._empty(group, len(ids)))
        self._done += 1
        asked = self._asked_before(group, tables, ids) or self._ask(group, tables, ids, training)
        try:
            if not self._has_come(asked):
                self.wait_until(lambda: self._has_come(asked), _NOT_SENT)
            return self._values(asked)
        finally:
            self._forget(asked)

    def distinct(self, group: int, tables: Int32s, ids: Int64s) -> Distinct:
        """Return the distinct ones of the (table, id) of a batch, perhaps found beforehand."""
        if self._looking is not None:
            keys = super().distinct(group, tables, ids)
            self._batch_looked_at = _BatchKeys(
                tables, np.array(ids), keys
            )  # users may change theirs
            return keys
        if self._coming and self._coming[0].group == group and (known := self._coming[0].batch):
            same = np.array_equal(known.ids, ids) and np.array_equal(known.tables, tables)
            if same:
                return known.keys
        return super().distinct(group, tables, ids)

    def _empty(self, group: int, count: int) -> Floats:
        form = self._forms[group]
        return np.empty((count, form.dim), form.dtype)

    def _values(self, asked: _AskedRows) -> Floats:
        """Return the rows of a look-up, of which all answers are here."""
        values = self._empty(asked.group, len(asked.ids))
        for request, where in asked.parts:
            answer = self._answers[request]
            if answer.refused:
                raise ConfigurationError(answer.refused)
            self.versions.append(answer.version)
            assert answer.payload is not None
            self.bytes_pulled += answer.payload.numel()
            rows = self._forms[asked.group].received(answer.payload.numpy())
            if isinstance(where, slice):
                return rows
            values[where] = rows
        return values

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

    def unpushed(self, step: int) -> Tensors:
        """Return the gradient that no update has; a step is a version where gradients are delayed."""
        return self.delayed.state(step)

    def push_later(self, gradient: Mapping[str, torch.Tensor]) -> None:
        """Push what `unpushed` returned with the next step, and nothing kept before."""
        self.delayed.load_state(gradient)

    def logged(self) -> Sequence[Any]:
        """Return what the log is to have of the present gradient, see `RowsOfPush`; nothing where it says nothing."""
        runs: list[tuple[int, int]] = []
        if any(version != self.position[1] for version in self.versions):
            runs = [(len(list(same)), version) for version, same in groupby(self.versions)]
        own = self.delayed.delays and self.delayed.is_last
        return RowsOfPush(runs, own) if runs or own else ()

    def look(self, place: Place, forward: Callable[[], None], *, later: bool) -> None:
        """Ask for the rows of a batch that is computed later, and do not wait for them.

        Args:
            forward: runs the forward pass, left at the last look-up by an exception.
            later: rows are to be of the version after `position`'s.
        """
        if len(self._awaited) >= _MOST_AWAITED:
            return
        self._looking, self._later = [], int(later)
        self._looked[place] = self._looking
        try:
            with contextlib.suppress(_LookedError):
                forward()
        finally:
            self._looking, self._later = None, 0

    def begin_batch(self, place: Place) -> None:
        """Begin the forward pass over a batch, whose rows may have been asked for already."""
        self._coming = self._looked.pop(place, [])
        self._done = 0

    def end_batch(self, weight: float) -> None:
        """Note that a batch is computed, and what it weighs."""
        super().end_batch(weight)
        self.lookups = self._done
        self._forget(*self._coming)

    def forget_looked_at(self) -> None:
        """Forget the rows of batches that were asked for beforehand: they may be of old versions."""
        self._forget(*(asked for looked in self._looked.values() for asked in looked))
        self._looked.clear()
        self._forget(*self._coming)

    def _forget(self, *lookups: _AskedRows) -> None:
        for asked in lookups:
            for request, _ in asked.parts:
                self._awaited.pop(request, None)
                self._answers.pop(request, None)

    def _asked_before(self, group: int, tables: Int32s, ids: Int64s) -> _AskedRows | None:
        """Return the look-up that was made beforehand for the same rows, if there was one."""
        if not self._coming:
            return None
        asked = self._coming.pop(0)
        same = asked.group == group and np.array_equal(asked.ids, ids)
        if same and np.array_equal(asked.tables, tables):
            return asked
        self._forget(asked)
        return None

    def _ask(self, group: int, tables: Int32s, ids: Int64s, training: bool) -> _AskedRows:
        """Ask servers for rows."""
        parts = []
        for server, where in self.dealing.parts(group, tables, ids, self._servers[group]).items():
            request = self._ask_one(server, group, tables[where], ids[where], training)
            parts.append((request, where))
        return _AskedRows(group, tables, ids, parts)

    def _ask_one(self, server: int, group: int, tables: Int32s, ids: Int64s, training: bool) -> int:
        """Ask a server for rows; return the number of the request."""
        self._sequence += 1
        self._awaited[self._sequence] = server
        generation, version = self.position
        keys = torch.from_numpy(pack_keys(tables, ids, ROW_MEMORY.empty))
        place = generation, self._sequence, version + self._later
        self._send(server_peer(server), PullRows(*place, group, training, keys).pack())
        return self._sequence

    def _has_come(self, asked: _AskedRows) -> bool:
        return all(request in self._answers for request, _ in asked.parts)

    def lacks(self) -> list[str]:
        """Return in words which servers have not sent rows that they were asked for."""
        asked = dict(self._awaited)
        servers = {server for request, server in asked.items() if request not in self._answers}
        return [f"rows of {listed(map(server_peer, sorted(servers)))}"] if servers else []

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return the memory for rows that arrive; None to drop those that nobody awaits."""
        return where_lent(message, size) if message.sequence in self._awaited else None

    def receive(self, source: Peer, message: Message) -> None:
        """Take the answer of a server; a late one, or a copy, is dropped; ProtocolError: another server was asked."""
        if message.sequence not in self._awaited:
            return
        if source.index != self._awaited[message.sequence]:
            raise ProtocolError(f"{source} answers what worker {self._worker} has asked another")
        self._answers[message.sequence] = Rows.unpack(message)
