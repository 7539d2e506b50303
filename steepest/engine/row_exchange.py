"""A worker's exchange of rows of embedding tables with servers, in the middle of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from steepest.engine.incoming_weights import where_lent
from steepest.engine.row_collector import RowCollector
from steepest.errors import ConfigurationError, ProtocolError
from steepest.messages.message import Message, Peer, Send, server_peer
from steepest.messages.rows import PullRows, Rows
from steepest.tables.dealing import Dealing
from steepest.tables.gradients import pack_keys
from steepest.tables.kernels import Floats, Int32s, Int64s

#: Receives messages until a condition holds; raises where it cannot come to hold any more.
WaitUntil = Callable[[Callable[[], bool]], None]


class RowExchange(RowCollector):
    """The rows that one worker's models use: pulled from servers, their gradients collected.

    Args:
        worker: its index, for errors.
        dealing: of tables into chunks.
        holders: the servers of each chunk, of which the first answers.
        send: sends as the worker.

    Attributes:
        wait_until: receives messages in the middle of a forward pass; the worker sets it.
        position: generation and version of the weights with which models compute.
        bytes_pulled: so far.
    """

    def __init__(
        self, worker: int, dealing: Dealing, holders: Sequence[Sequence[int]], send: Send
    ) -> None:
        super().__init__(dealing)
        self.wait_until: WaitUntil | None = None
        self.position = (0, 0)
        self.bytes_pulled = 0
        self._worker = worker
        self._send = send
        self._sequence = 0
        self._awaited: dict[int, int] = {}  # by request, the server
        self._answers: dict[int, Rows] = {}
        self._servers = np.array(  # by group and shard
            [
                [holders[dealing.chunk(group, shard)][0] for shard in range(dealing.num_shards)]
                for group in range(len(dealing.groups))
            ]
        )

    def pull(self, group: int, tables: Int32s, ids: Int64s, training: bool = True) -> Floats:
        """Return the values of rows, (n, dim), as servers have them; waits for the answers.

        Args:
            group: its number.
            tables, ids: (n,), distinct.
            training: whether their gradients will be pushed.

        Raises:
            ConfigurationError: a table has no room for a row of each id, or the models are not in
                a process of a job.
        """
        if self.wait_until is None:
            raise ConfigurationError("rows of embedding tables are pulled while a job runs")
        one = self.dealing.groups[group][0]
        values = np.empty((len(ids), one.dim), one.dtype)
        order, begins = self.dealing.deal(tables, ids)
        asked: list[tuple[int, Int64s]] = []
        try:
            for server in np.unique(self._servers[group]):
                shards = np.flatnonzero(self._servers[group] == server)
                mine = np.concatenate([order[begins[s] : begins[s + 1]] for s in shards])
                if len(mine):
                    asked.append((self._ask(int(server), group, tables, ids, mine, training), mine))
            if not self._have_come(asked):
                self.wait_until(lambda: self._have_come(asked))
            for request, mine in asked:
                self._take(self._answers[request], values, mine)
        finally:
            for request, _ in asked:
                self._awaited.pop(request, None)
                self._answers.pop(request, None)
        return values

    def _ask(
        self, server: int, group: int, tables: Int32s, ids: Int64s, mine: Int64s, training: bool
    ) -> int:
        """Ask a server for some of the rows; return the number of the request."""
        self._sequence += 1
        self._awaited[self._sequence] = server
        keys = torch.from_numpy(pack_keys(tables[mine], ids[mine]))
        pull = PullRows(self.position[0], self._sequence, self.position[1], group, training, keys)
        self._send(server_peer(server), pull.pack())
        return self._sequence

    def _have_come(self, asked: Sequence[tuple[int, Int64s]]) -> bool:
        return all(request in self._answers for request, _ in asked)

    def _take(self, answer: Rows, values: Floats, mine: Int64s) -> None:
        """Write the rows of an answer to their places."""
        if answer.refused:
            raise ConfigurationError(answer.refused)
        assert answer.payload is not None
        self.bytes_pulled += answer.payload.numel()
        values[mine] = answer.payload.numpy().view(values.dtype).reshape(len(mine), -1)

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return the memory for rows that arrive; None to drop those that nobody awaits."""
        return where_lent(message, size) if message.sequence in self._awaited else None

    def receive(self, source: Peer, message: Message) -> None:
        """Take the answer of a server; a late one, or a copy, is dropped.

        Raises:
            ProtocolError: it is another server's than the one that was asked.
        """
        if message.sequence not in self._awaited:
            return
        if source.index != self._awaited[message.sequence]:
            raise ProtocolError(f"{source} answers what worker {self._worker} has asked another")
        self._answers[message.sequence] = Rows.unpack(message)
