"""How a host's aggregator attaches to the workers beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from steepest.core.engine.exchange import NOTHING_YET, Arrived, Exchange, ExchangeAround
from steepest.core.engine.extension import Extension
from steepest.core.engine.job import Job
from steepest.core.engine.replicas import Replicas
from steepest.core.messages.message import Kind, Message, Peer, Send, aggregator_peer, server_peer
from steepest.core.tensors.memory import Memory, as_tensor


class SharedWeights(ExchangeAround):
    """Has replicas, and the wrapped exchange, use the aggregator's vector if they can.

    Args:
        adopt: called with a flat vector of weights that all workers of this host share; returns whether the
            models use it from now on.
        nbytes: the vector's size.
    """

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
        vector = message.payload
        if vector is not None and self._adopt(vector):
            self.use(vector)
        return NOTHING_YET


def route_of(job: Job, worker: int) -> Callable[[int], Peer] | None:
    """Return a function from a server to the peer that takes a worker's pushes for it, its aggregator or the server.

    None for a worker without an aggregator.
    """
    hosts, codec = job.places, job.wire_formats[0]
    aggregator = hosts.aggregator_of(worker)
    if aggregator is None:
        return None
    # with a lossy codec each worker compresses its own gradient and keeps the error
    if codec is not None and (codec.lossy or codec.everywhere):
        return server_peer
    sums_up = aggregator_peer(aggregator)
    return lambda server: server_peer(server) if hosts.beside(worker, server) else sums_up


class Aggregation(Extension):
    """Attaches workers to their host's aggregator, which takes pushes to other hosts and receives their weights."""

    def route(self, job: Job, worker: int) -> Callable[[int], Peer] | None:
        """Return `route_of` a worker."""
        return route_of(job, worker)

    def exchange(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, send: Send
    ) -> Exchange:
        """Return an exchange that takes weights in memory that the host's workers share."""
        if job.places.aggregator_of(worker) is None:
            return exchange
        # With a server in its process it stays with the vector that this server updates.
        adopt = _refuse if job.servers_in_workers else replicas.adopt
        return SharedWeights(exchange, adopt, job.description.layout.nbytes)


def _refuse(weights: object) -> bool:
    """Return False: no other process' vector is used."""
    return False
