"""Which of a job's processes share a host, and who there speaks for whom."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from steepest.messages.message import Peer, relay_peer, worker_peer


@dataclass(frozen=True)
class Hosts:
    """Where the workers and servers of a job run; hosts are numbered.

    Attributes:
        workers: the host of each worker.
        servers: the host of each server.
        gathers: whether what several workers of a host have in common passes through a relay.

    Example:
        >>> hosts = Hosts(workers=(0, 0, 1), servers=(0, 1), gathers=True)
        >>> hosts.relays
        {0: (0, 1)}
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    gathers: bool = False

    @classmethod
    def apart(cls, workers: int, servers: int) -> Hosts:
        """Every process on a host of its own."""
        return cls(tuple(range(workers)), tuple(range(workers, workers + servers)))

    @cached_property
    def relays(self) -> dict[int, tuple[int, ...]]:
        """For each server with a relay beside it the workers that the relay serves.

        A host has one if it has a server (beside the first of which it lives) and several workers.
        """
        found: dict[int, tuple[int, ...]] = {}
        for host in sorted(set(self.servers)) if self.gathers else ():
            workers = tuple(worker for worker, where in enumerate(self.workers) if where == host)
            if len(workers) > 1:
                found[self.servers.index(host)] = workers
        return found

    def relay_of(self, worker: int) -> int | None:
        """The relay of a worker, if it has one."""
        return next((relay for relay, workers in self.relays.items() if worker in workers), None)

    def reader_of(self, worker: int) -> Peer:
        """To whom servers send the weights that a worker wants."""
        relay = self.relay_of(worker)
        return worker_peer(worker) if relay is None else relay_peer(relay)

    def host_of(self, peer: Peer) -> int | None:
        """Where a worker, a server or a relay runs; None for others."""
        where = self.workers if peer.role == "worker" else self.servers if peer.role in ("server", "relay") else ()
        return where[peer.index] if peer.index < len(where) else None

    def beside(self, worker: int, server: int) -> bool:
        """Whether a worker and a server share a host."""
        return self.workers[worker] == self.servers[server]
