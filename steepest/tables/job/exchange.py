"""A worker's exchange where its models have embedding tables: rows come in the middle of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steepest.core.engine.exchange import (
    NOTHING_YET,
    Arrived,
    Exchange,
    ExchangeAround,
    Sent,
    WaitUntil,
)
from steepest.core.engine.incoming_weights import Key
from steepest.core.messages.message import Message, Peer
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.memory import Memory
from steepest.tables.job.companion import RowCompanion
from steepest.tables.job.job_tables import UNPUSHED
from steepest.tables.job.row_exchange import RowExchange
from steepest.tables.job.row_messages import RowKind


class ExchangeWithRows(ExchangeAround):
    """Pulls rows of tables, and pushes their gradients as chunks of the exchange that it stands around.

    Args:
        companion: of these rows, in place of that of the other exchange.
    """

    def __init__(self, inner: Exchange, rows: RowExchange, companion: RowCompanion) -> None:
        super().__init__(inner)
        self.rows = rows
        self.companion = companion
        self.kinds = inner.kinds | {RowKind.ROWS}

    def begin_life(self, incarnation: int, wait_until: WaitUntil) -> None:
        """Begin to pull rows."""
        super().begin_life(incarnation, wait_until)
        self.rows.begin_life(incarnation, wait_until)

    def begin_generation(self) -> None:
        """Forget rows that were asked for beforehand."""
        super().begin_generation()
        self.rows.forget_looked_at()

    def stand_at(self, generation: int, version: int) -> None:
        """Pull rows of this version from now on."""
        super().stand_at(generation, version)
        self.rows.position = (generation, version)

    def begin(self, generation: int, version: int, incarnation: int, *, is_last: bool) -> None:
        """Begin a push; the last that is granted has the gradients of its own rows, too."""
        super().begin(generation, version, incarnation, is_last=is_last)
        self.rows.begin(generation, version)
        self.rows.delayed.is_last = is_last

    def end(self) -> Sent:
        """Return the bytes that have travelled, those of rows included."""
        sent, rows, self.rows.bytes_pulled = super().end(), self.rows.bytes_pulled, 0
        return sent._replace(bytes_pulled=sent.bytes_pulled + rows)

    def logged(self) -> Sequence[Any]:
        """Return what a replay needs to know of the gradient, see `RowsOfPush`; nothing if it needs nothing."""
        return self.rows.logged()

    def left_out(self) -> None:
        """Keep the part of the last push that was of the step before."""
        super().left_out()
        self.rows.delayed.left_out()

    def lacks(self, key: Key | None) -> list[str]:
        """Name the servers that have not sent weights and rows."""
        return [*super().lacks(key), *self.rows.lacks()]

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return memory for a payload."""
        if message.kind is RowKind.ROWS:
            return self.rows.destination(message, size)
        return super().destination(message, size)

    def receive(self, source: Peer, message: Message) -> Arrived:
        """Take a message with rows, or another one."""
        if message.kind is RowKind.ROWS:
            self.rows.receive(source, message)
            return NOTHING_YET
        return super().receive(source, message)

    def state(self, step: int) -> dict[str, Tensors]:
        """Return gradients of rows that no update has, too."""
        unpushed = self.rows.unpushed(step)
        return super().state(step) | ({UNPUSHED: unpushed} if unpushed else {})

    def load_state(self, what: str, state: Mapping[str, torch.Tensor]) -> None:
        """Load a state; gradients of rows in it are pushed with the next step."""
        if what == UNPUSHED:
            self.rows.push_later(state)
        else:
            super().load_state(what, state)
