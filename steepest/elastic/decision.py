"""Which processes continue a job after deaths, and where its state comes from: a pure function of what is known."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from steepest.messages.message import Peer


@dataclass(frozen=True)
class World:
    """A job's processes at one moment, when survivors stand still.

    Attributes:
        workers: number of workers, dead ones included.
        servers: number of processes that are servers only, dead ones included.
        dead: the processes that are gone, at least one.
        ready: those of `dead` in whose place another process stands ready.
        worn_out: those of `dead` in whose place processes died too often; nobody takes it again.
        whole: whether the survivors hold every chunk, at one version.
        snapshot: whether the driver has a copy of everything.
    """

    workers: int
    servers: int
    dead: Set[Peer]
    ready: Set[Peer] = frozenset()
    worn_out: Set[Peer] = frozenset()
    whole: bool = True
    snapshot: bool = False


@dataclass(frozen=True)
class Target:
    """What the user allows, and what the strategy can do.

    Attributes:
        least: the fewest workers that train without the others.
        waits: whether a step waits for the successors of dead processes.
        movable: whether servers' chunks can go to other servers, and workers be renumbered, without
            processes that start anew.
    """

    least: int
    waits: bool = False
    movable: bool = True


@dataclass(frozen=True)
class Transition:
    """The processes with which a job continues.

    Attributes:
        source: where its state comes from: the surviving processes, or the driver's snapshot.
        replaced: dead processes whose successors are part of the job before it continues.
        left: dead workers without which the others continue; successors join later, but for those
            whose place is worn out.
        servers: number of processes that are servers only.
    """

    source: Literal["processes", "snapshot"]
    replaced: frozenset[Peer]
    left: frozenset[Peer]
    servers: int


@dataclass(frozen=True)
class Impossible:
    """The job cannot continue.

    Attributes:
        peer: the dead process for which that is so.
        why: in words, to follow the cause of its death.
    """

    peer: Peer
    why: str


def decide(world: World, target: Target) -> Transition | Impossible:
    """Return with which processes a job continues, or why it cannot.

    Survivors continue at once where they are enough; otherwise successors are awaited. Successors
    that stand ready, all of them, are awaited in any case, because that takes no longer.

    Example:
        >>> dead = {Peer("worker", 1), Peer("server", 0)}
        >>> found = decide(World(workers=4, servers=2, dead=dead), Target(least=2))
        >>> found.left, found.servers, found.source
        (frozenset({Peer(role='worker', index=1)}), 1, 'processes')
    """
    if not world.whole and not world.snapshot:
        return Impossible(min(world.dead), "too many died together: of some chunks no copy is left")
    workers = frozenset(peer for peer in world.dead if peer.role == "worker")
    servers = world.servers - (len(world.dead) - len(workers))
    enough = target.movable and (
        (not workers or world.workers - len(workers) >= max(target.least, 1))
        and (servers > 0 or servers == world.servers)
    )
    source: Literal["processes", "snapshot"] = "processes" if world.whole else "snapshot"
    if world.worn_out and not enough:
        return Impossible(min(world.worn_out), "processes died there too often")
    if enough and (world.worn_out or not (target.waits or world.dead <= world.ready)):
        return Transition(source, frozenset(), workers, servers)
    return Transition(source, frozenset(world.dead), frozenset(), world.servers)
