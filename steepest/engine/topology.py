"""Which processes of a job share a host, which hold a chunk, and how it travels between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from steepest.compression.codecs import Codec
from steepest.messages.message import Peer, aggregator_peer, worker_peer
from steepest.tensors.layout import ParameterLayout

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing


@dataclass(frozen=True)
class HostMap:
    """The hosts on which the workers and servers of a job run, by number.

    Attributes:
        workers: the host of each worker.
        servers: the host of each server.
        gathers: whether gradients and weights between several workers of one host and servers of
            other hosts pass through an aggregator.

    Example:
        >>> hosts = HostMap(workers=(0, 0, 1), servers=(0, 1), gathers=True)
        >>> hosts.aggregators
        {0: (0, 1)}
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    gathers: bool = False

    @classmethod
    def apart(cls, workers: int, servers: int) -> HostMap:
        """Return the hosts of a job in which every process has one of its own."""
        return cls(tuple(range(workers)), tuple(range(workers, workers + servers)))

    @cached_property
    def aggregators(self) -> dict[int, tuple[int, ...]]:
        """The workers of each aggregator, by the aggregator's index.

        A host with a server and several workers has an aggregator, in the process of its first
        server, whose index it has.
        """
        found: dict[int, tuple[int, ...]] = {}
        for host in sorted(set(self.servers)) if self.gathers else ():
            workers = tuple(worker for worker, where in enumerate(self.workers) if where == host)
            if len(workers) > 1:
                found[self.servers.index(host)] = workers
        return found

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The part of the model that each server should hold, so that all links are equally busy.

        Of n hosts with workers and k with servers alone, each of the k holds 2 (n - 1) and each of
        the n holds n - k parts of n^2 + k n - 2 k (Jiang et al. 2020, section 4.1); from k = n on
        the k hosts hold all. Servers of one host have equal parts of its part. Where no host serves
        alone, or a host with workers has no server, all servers have equal parts.

        Reference: A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous
        GPU/CPU Clusters, OSDI 2020.

        Example:
            >>> HostMap(workers=(0, 1, 2), servers=(0, 1, 2, 3)).shares
            (0.2, 0.2, 0.2, 0.4)
        """
        working, serving = set(self.workers), set(self.servers)
        alone, n = len(serving - working), len(working)
        if not alone or n == 1 or not working <= serving:
            return (1 / len(self.servers),) * len(self.servers)
        alone_part, working_part = 1 / alone, 0.0
        if alone < n:
            parts = n * n + alone * n - 2 * alone
            alone_part, working_part = 2 * (n - 1) / parts, (n - alone) / parts
        return tuple(
            (working_part if host in working else alone_part) / self.servers.count(host)
            for host in self.servers
        )

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
    """How a model is spread over the processes of a job, the same in all of them.

    Attributes:
        layout: of the model.
        holders: the servers of each chunk: the first answers for it, the others have copies,
            updated alike.
        hosts: where workers and servers run, and which workers have an aggregator.
        wire_formats: how float32 chunks are pushed to servers of other hosts, and in which dtype
            they are pulled from there; None for as they are.
        tables: how embedding tables are dealt into shards; None without tables.
    """

    layout: ParameterLayout
    holders: Sequence[Sequence[int]]
    hosts: HostMap
    wire_formats: tuple[Codec | None, torch.dtype | None] = (None, None)
    tables: Dealing | None = None
