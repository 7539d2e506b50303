"""One tensor of 100 MB reduced among processes: `steepest.collectives.all_reduce` and Gloo's, without Ray."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.namespaces import DEADLINE, Member, Namespace, Orders, Team
from benchmarks.parameter_server_bodies import read, write
from steepest import collectives
from steepest.core.messages.message import member_peer
from steepest.core.tensors.allocator import keep_freed_memory
from steepest.core.tensors.shared_memory import AVAILABLE
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.runtime.tls.certificates import make_certificate
from steepest.runtime.tls.connections import Identity, encryption_with
from steepest.strategies.collectives.members import MemberCollective

ELEMENTS = 25_000_000  # of float32


def gloo(orders: Orders, namespace: Namespace, url: str, rank: int, world: int) -> None:
    """One process of torch.distributed's; in place."""
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.device
    limit = timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world, timeout=limit)
    tensor = torch.zeros(ELEMENTS).fill_(0.0)  # a sum that stays what it is; with pages of its own
    orders.serve(lambda: dist.all_reduce(tensor))
    dist.destroy_process_group()


def ours(
    orders: Orders,
    namespace: Namespace,
    meeting: str,
    token: bytes,
    rank: int,
    world: int,
    identity: Identity | None = None,
) -> None:
    """One process of ours, as a worker of a trainer has it; the result is a new tensor."""
    keep_freed_memory()
    router = Router()
    peers = (member_peer(rank),)
    wire = WireTransport(
        token, peers, namespace.name, router.destination, encryption=encryption_with(identity)
    )
    router.use(wire)
    write(Path(meeting) / str(rank), wire.listen(namespace.address))
    addresses = [read(Path(meeting) / str(other)) for other in range(world)]
    one_host = AVAILABLE and wire.lends and len({address.node for address in addresses}) == 1
    member = MemberCollective(
        rank,
        world,
        router,
        DEADLINE,
        lambda other, seconds: wire.connect(addresses[other], seconds),
        one_host=one_host,
    )
    tensor = torch.zeros(ELEMENTS).fill_(0.0)
    with collectives.using(member):
        orders.serve(lambda: collectives.all_reduce(tensor))


def secured(spaces: list[Namespace], plain: str, encrypted: str) -> dict[str, Team]:
    """Ours without and with TLS, a process in each of these namespaces.

    Args:
        plain, encrypted: empty folders in which they write where they listen.
    """
    return {
        name: Team(
            name,
            [
                Member(
                    space,
                    ours,
                    {
                        "namespace": space,
                        "rank": rank,
                        "world": len(spaces),
                        "meeting": meeting,
                        "token": token,
                        "identity": identity,
                    },
                )
                for rank, space in enumerate(spaces)
            ],
        )
        for name, meeting, token, identity in (
            ("plain", plain, secrets.token_bytes(32), None),
            ("TLS", encrypted, secrets.token_bytes(32), make_certificate()),
        )
    }


def teams(spaces: list[Namespace], port: int, meeting: str) -> dict[str, Team]:
    """Ours and Gloo's, a process in each of these namespaces.

    Args:
        meeting: an empty folder in which ours write where they listen.
    """
    world = len(spaces)
    url = f"tcp://{spaces[0].address}:{port}"
    common = {"meeting": meeting, "token": secrets.token_bytes(32), "world": world}

    def team(name: str, body: object, settings: dict[str, object]) -> Team:
        members = [
            Member(space, body, {"namespace": space, "rank": rank, **settings})  # type: ignore[arg-type]
            for rank, space in enumerate(spaces)
        ]
        return Team(name, members)

    return {
        "gloo": team("gloo", gloo, {"url": url, "world": world}),
        "steepest": team("steepest", ours, common),
    }
