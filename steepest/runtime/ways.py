"""The ways in which a job's processes talk: by memory or sockets."""

from __future__ import annotations

from collections.abc import Mapping

from steepest.core.engine.job import Job
from steepest.core.engine.topology import HostMap
from steepest.core.messages.message import Peer, server_peer
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.shared_memory import AVAILABLE
from steepest.core.transport.channel import ChannelSink
from steepest.core.transport.sockets import WireTransport
from steepest.runtime.job_runtime import runtime
from steepest.runtime.places import Place
from steepest.runtime.tls.connections import Identity, encryption_with


def hosts_of(places: Mapping[Peer, Place], num_servers: int, config: Strategy) -> HostMap:
    """Return which processes share a node. Over TCP alone no two do, since they share no memory."""
    strategy, nodes = config, dict[str, int]()

    def number(peer: Peer) -> int:
        node = str(peer) if config.transport == "tcp" else places[peer].node
        return nodes.setdefault(node, len(nodes))

    workers = tuple(number(peer) for peer in places if peer.role == "worker")
    servers = (
        workers
        if strategy.in_workers
        else tuple(number(server_peer(i)) for i in range(num_servers))
    )
    gathers = AVAILABLE and config.transport in ("wire", "shared")
    if strategy.in_workers and len(nodes) == 1:
        gathers = False  # each member updates its own weights, and nothing has to cross
    return HostMap(workers, servers, gathers)


def make_transport(
    job: Job,
    token: bytes,
    peers: tuple[Peer, ...],
    node: str,
    sink: ChannelSink,
    identity: Identity | None = None,
) -> WireTransport:
    """Return a transport for one of a job's processes; ConfigurationError if its certificate cannot be read."""
    encryption = encryption_with(identity)
    return runtime().transport(token, peers, node, sink, job.config.transport, encryption)
