"""Rows of embedding tables for a replay, of the versions that they had in the run."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from steepest.core.engine.commit_log import Commit, LoggedPush
from steepest.core.engine.server import Server
from steepest.core.messages.message import Message, Peer
from steepest.errors import ConfigurationError
from steepest.tables.job.row_exchange import RowExchange
from steepest.tables.job.row_messages import PullRows, RowsOfPush
from steepest.tables.job.row_pulls import RowPulls
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows.dealing import Dealing


class RowsOfVersions:
    """Answers workers' pulls of rows, each from the version that answered it in the run."""

    # The one server of a replay has the newest rows; those of an older version that a later push needs are copied
    # before they change. server: holds all chunks, at the version with which the log begins; delays: whether gradients
    # of rows were pushed a step late.

    def __init__(
        self, dealing: Dealing, server: Server, commits: tuple[Commit, ...], delays: bool
    ) -> None:
        self._dealing = dealing
        self._server = server
        self._delays = delays
        self._last_use: dict[int, int] = {}  # by version: the last one made from its rows
        for commit in commits:
            for push in commit.pushes:
                for version in {
                    push.pulled,
                    *(version for _, version in RowsOfPush.of(push).versions),
                }:
                    self._last_use[version] = commit.version
        self._old: dict[int, dict[int, TableChunk]] = {}  # by version, chunk
        self._push: LoggedPush | None = None
        self._versions: Iterator[int] = iter(())
        self._keep()

    @property
    def _chunks(self) -> dict[int, TableChunk]:
        """The newest rows, by chunk."""
        held = self._server.chunks.items()
        return {index: chunk for index, chunk in held if isinstance(chunk, TableChunk)}

    def begin(self, push: LoggedPush, rows: RowExchange) -> None:
        """Begin a worker's logged gradient, before the `RowExchange.begin` of that life's rows."""
        self._push = push
        runs, own = RowsOfPush.of(push)
        self._versions = (version for count, version in runs for _ in range(count))
        if rows.wait_until is None:
            rows.begin_life(push.incarnation, lambda has_come, why: None)  # answers come at once
            rows.delayed.delays = self._delays
        rows.delayed.is_last = own

    def end(self) -> None:
        """End a worker's gradient; ConfigurationError: it needed fewer rows than in the run."""
        if next(self._versions, None) is not None:
            raise self._other_rows()

    def answer(self, source: Peer, server: Peer, message: Message, rows: RowExchange) -> None:
        """Answer a worker's PULL_ROWS with rows of the version that its run's answer had."""
        # ConfigurationError: other rows.
        assert self._push is not None
        pull: PullRows = message.body
        version = (
            next(self._versions, None) if RowsOfPush.of(self._push).versions else self._push.pulled
        )
        now = version == self._server.version
        chunks = self._chunks if now else self._old.get(-1 if version is None else version)
        if version is None or chunks is None:
            raise self._other_rows()
        pulls = RowPulls(
            server.index, self._dealing, chunks, lambda _, answer: rows.receive(server, answer)
        )
        at = (pull.generation, version)
        pulls.receive(source, replace(pull, version=version), message.payload, at)

    def _other_rows(self) -> ConfigurationError:
        assert self._push is not None
        worker, sequence = self._push.worker, self._push.sequence
        return ConfigurationError(
            f"push {sequence} of worker {worker} needs other rows than in the run: give the model and "
            "the data that it had"
        )

    def committed(self) -> None:
        """Note that the server has come to a new version."""
        now = self._server.version
        self._old = {v: rows for v, rows in self._old.items() if self._last_use[v] > now}
        self._keep()

    def _keep(self) -> None:
        """Copy the rows of now, if a push after the next commit needs them."""
        now = self._server.version
        if self._last_use.get(now, 0) <= now + 1:
            return
        copies = self._old[now] = {}
        for index, held in self._chunks.items():
            rows = self._dealing.make(index, held.rows.seed)
            rows.load([held.rows.export()], held.rows.version)
            copies[index] = TableChunk(held.chunk, self._dealing)
            copies[index].rows = rows
