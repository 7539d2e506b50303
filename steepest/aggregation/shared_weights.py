"""A worker's exchange where its host has an aggregator: the weights lie in memory that the host's workers share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from steepest.core.engine.exchange import NOTHING_YET, Arrived, Exchange, ExchangeAround
from steepest.core.messages.gradients import WeightsShared
from steepest.core.messages.message import Kind, Message, Peer
from steepest.core.tensors.memory import Memory, as_tensor


class SharedWeights(ExchangeAround):
    """Has replicas use the aggregator's vector, where they can, and the exchange that this stands around, too."""

    # adopt: called with a flat vector of weights that all workers of this host share; returns whether the models use it
    # from now on; nbytes: the vector's size.

    def __init__(self, inner: Exchange, adopt: Callable[[torch.Tensor], bool], nbytes: int) -> None:
        super().__init__(inner)
        self.kinds = inner.kinds | {Kind.WEIGHTS_SHARED}
        self._adopt = adopt
        self._nbytes = nbytes

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return memory for a payload; None for a vector that does not lie in memory of this host."""
        if message.kind is Kind.WEIGHTS_SHARED and size == self._nbytes:
            return None if message.payload is None else as_tensor(message.payload)
        return super().destination(message, size)

    def receive(self, source: Peer, message: Message) -> Arrived:
        """Take a message with the vector, or another one."""
        if message.kind is not Kind.WEIGHTS_SHARED:
            return super().receive(source, message)
        vector = WeightsShared.unpack(message).payload
        if vector is not None and self._adopt(vector):
            self.use(vector)
        return NOTHING_YET
