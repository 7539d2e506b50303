"""Which processes of a job share a host, which hold each chunk, and how chunks travel between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from steepest.core.engine.stores import Stores
from steepest.core.messages.message import Peer, aggregator_peer, worker_peer
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ParameterLayout


@dataclass(frozen=True)
class HostMap:
    """The hosts on which the workers and servers of a job run, by number.

    Example:
        >>> hosts = HostMap(workers=(0, 0, 1), servers=(0, 1), gathers=True)
        >>> hosts.aggregators
        {0: (0, 1)}
    """

    workers: tuple[int, ...]  # the host of each worker
    servers: tuple[int, ...]  # the host of each server
    # whether several workers of a host exchange gradients and weights with other hosts' servers through an aggregator
    gathers: bool = False
    # whether workers add up gradients among themselves, push the sum to their own servers, and pass on the weights that
    # these make of it
    reduces: bool = False

    @classmethod
    def apart(cls, workers: int, servers: int) -> HostMap:
        """Return the hosts of a job in which every process has a host of its own."""
        return cls(tuple(range(workers)), tuple(range(workers, workers + servers)))

    @cached_property
    def aggregators(self) -> dict[int, tuple[int, ...]]:
        """The workers of each aggregator, by its index: that of the host's first server, whose process it shares.

        A host with a server and several workers has an aggregator.
        """
        by_server: dict[int, tuple[int, ...]] = {}
        for host in sorted(set(self.servers)) if self.gathers else ():
            workers = tuple(worker for worker, where in enumerate(self.workers) if where == host)
            if len(workers) > 1:
                by_server[self.servers.index(host)] = workers
        return by_server

    def summed_by(self, aggregator: int) -> tuple[int, ...]:
        """Return the workers whose gradients may be pushed as one sum by the aggregator of an index."""
        if self.reduces:
            return tuple(range(len(self.workers))) if aggregator < len(self.servers) else ()
        return self.aggregators.get(aggregator, ())

    @cached_property
    def beside_workers(self) -> tuple[int, ...]:
        """The servers that hold the dense parameters: those on hosts with workers.

        All servers, if a host with workers has none. A step's weights leave when all its gradients
        have come, so chunks on servers elsewhere use each worker's link first one way, then the
        other; chunks on servers beside workers use each link both ways at once.

        Example:
            >>> HostMap(workers=(0, 1), servers=(2, 0, 1)).beside_workers
            (1, 2)
        """
        servers, working = enumerate(self.servers), set(self.workers)
        if not working <= set(self.servers):
            return tuple(range(len(self.servers)))
        return tuple(server for server, host in servers if host in working)

    def aggregator_of(self, worker: int) -> int | None:
        """Return the index of a worker's aggregator, or None if it has none."""
        return next(
            (aggregator for aggregator, workers in self.aggregators.items() if worker in workers),
            None,
        )

    def reader_of(self, worker: int) -> Peer:
        """Return the peer to which servers send a worker's weights: its aggregator, or itself."""
        aggregator = self.aggregator_of(worker)
        return worker_peer(worker) if aggregator is None else aggregator_peer(aggregator)

    def host_of(self, peer: Peer) -> int | None:
        """Return the host of a worker, a server or an aggregator; None for other peers."""
        where = (
            self.workers
            if peer.role == "worker"
            else self.servers
            if peer.role in ("server", "aggregator")
            else ()
        )
        return where[peer.index] if peer.index < len(where) else None

    def beside(self, worker: int, server: int) -> bool:
        """Return whether the worker and the server of some indices share a host."""
        return self.workers[worker] == self.servers[server]


@dataclass(frozen=True)
class Topology:
    """How a model is spread over the processes of a job, the same in all of them."""

    layout: ParameterLayout
    # the servers of each chunk: the first answers for it, the others have copies, updated alike
    holders: Sequence[Sequence[int]]
    hosts: HostMap  # where workers and servers run, and which workers have an aggregator
    # how float32 chunks are pushed to servers of other hosts, and in which dtype they are pulled; None if unchanged
    wire_formats: tuple[Codec | None, torch.dtype | None] = (None, None)
    # the form in which changes of weights are pulled from servers of other hosts; None to pull weights
    pull_codec: Codec | None = None
    stores: Stores | None = None  # makes servers' stores of opaque chunks; None without such chunks

    # the chunks of each push, by the first of them, if they are those of another topology
    pushes: Mapping[int, tuple[int, ...]] | None = None

    @cached_property
    def pushed(self) -> Mapping[int, tuple[int, ...]]:
        """The trainable chunks whose gradients are one push, by the first of them.

        Opaque chunks that the same servers hold are pushed together, each other chunk by itself.
        """
        if self.pushes is not None:
            return self.pushes
        layout, holders = self.layout, self.holders
        found: dict[Sequence[int], list[int]] = {}
        for chunk in layout.opaque_chunks:
            found.setdefault(tuple(holders[chunk]), []).append(chunk)
        alone = {chunk: (chunk,) for chunk in layout.dense_chunks}
        return alone | {chunks[0]: tuple(chunks) for chunks in found.values()}
