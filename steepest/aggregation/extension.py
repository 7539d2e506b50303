"""How a host's aggregator attaches to the workers beside it."""

from __future__ import annotations

from collections.abc import Callable

from steepest.aggregation.shared_weights import SharedWeights
from steepest.core.engine.exchange import Exchange
from steepest.core.engine.extension import Extension
from steepest.core.engine.job import Job
from steepest.core.engine.replicas import Replicas
from steepest.core.messages.message import Peer, Send, aggregator_peer, server_peer


def route_of(job: Job, worker: int) -> Callable[[int], Peer] | None:
    """Return who takes what a worker pushes to a server: its aggregator what leaves the host; None if it has none."""
    hosts, codec = job.places, job.wire_formats[0]
    aggregator = hosts.aggregator_of(worker)
    if aggregator is None:
        return None
    # With a lossy codec each worker compresses its own gradient and keeps what is left out.
    if codec is not None and (codec.lossy or codec.everywhere):
        return server_peer
    sums_up = aggregator_peer(aggregator)
    return lambda server: server_peer(server) if hosts.beside(worker, server) else sums_up


class Aggregation(Extension):
    """Workers of a host with an aggregator: it takes what leaves the host, and has the weights that come to it."""

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
