"""Decide with which processes a job continues: a pure function of the present and the wanted processes."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from steepest.core.messages.message import Peer

Source = Literal["processes", "snapshot"]


@dataclass(frozen=True)
class World:
    """A job's processes at one moment."""

    workers: int  # dead ones included
    servers: int  # processes that are servers only, dead ones included
    dead: Set[Peer] = frozenset()
    leaving: Set[Peer] = frozenset()  # living processes on nodes that will go
    # those of `dead` and `leaving` in whose place another process stands ready
    ready: Set[Peer] = frozenset()
    # those of `dead` that get no successor, because too many processes have died in their places
    worn_out: Set[Peer] = frozenset()
    # those of `dead` whose successors are not awaited any more, because they are late; they may still come
    late: Set[Peer] = frozenset()
    stuck: bool = False  # whether no step can be taken without a change: a dead process held chunks, for example
    overdue: bool = False  # whether the successors of dead workers were awaited long enough
    full: bool = False  # whether the cluster has no room for the workers that leave
    joining: int = 0  # processes that stand ready to be further workers
    opening: int = 0  # processes that stand ready to be further servers
    whole: bool = True  # whether living processes hold every chunk, at one version
    snapshot: bool = False  # whether there is a copy of everything


@dataclass(frozen=True)
class Target:
    """The processes that the user wants, and the abilities of the strategy."""

    # the fewest workers that train while others are missing; a single one, which holds all weights, only if no
    # successor comes
    least: int
    workers: int
    servers: int  # processes that are servers only
    waits: bool = False  # whether a step waits for the successors of dead processes
    # whether chunks can go to other servers, and workers be renumbered, without starting processes
    movable: bool = True
    switched: bool = False  # whether another strategy, or set of trained parameters, is wanted


@dataclass(frozen=True)
class Transition:
    """The processes with which a job continues."""

    source: Source  # where its state comes from
    replaced: frozenset[Peer]  # processes whose successors are part of the job before it continues
    # workers without which the others continue; successors of dead ones join later, unless worn out
    missing: frozenset[Peer]
    workers: int
    servers: int  # processes that are servers only


@dataclass(frozen=True)
class Impossible:
    """The job cannot continue."""

    peer: Peer | None  # the dead process; None if only one is dead that had left the job
    why: str  # in words, to follow the cause of its death


def decide(world: World, target: Target) -> Transition | Impossible | None:
    """Return the processes with which a job continues, or why it cannot; None to leave it unchanged.

    Deaths come first, then nodes that will go, then the numbers of workers and servers. It is called
    again after each transition, and after every change of its arguments.

    Example:
        >>> dead = {Peer("worker", 1), Peer("server", 0)}
        >>> world = World(workers=4, servers=2, dead=dead, stuck=True)
        >>> found = decide(world, Target(least=2, workers=4, servers=2))
        >>> found.missing, found.workers, found.servers, found.source
        (frozenset({Peer(role='worker', index=1)}), 3, 1, 'processes')
    """
    if not world.whole and not world.snapshot:
        peer = min(world.dead, default=None)
        return Impossible(peer, "too many died together: of some chunks no copy is left")
    source: Source = "processes" if world.whole else "snapshot"
    if world.dead:
        return _without_the_dead(world, target, source)
    if world.leaving:
        return _away(world, target, source)
    return _resized(world, target, source)


def _without_the_dead(
    world: World, target: Target, source: Source
) -> Transition | Impossible | None:
    """Return the transition of a job after deaths.

    Survivors continue at once where they are enough; otherwise successors are awaited. Where
    survivors only miss workers, successors that stand ready join, and others are awaited until
    they are overdue. Where they miss more, successors that stand ready, all of them, are awaited in
    any case, because that takes no longer. If no server lives, the successors of servers are
    awaited, whatever becomes of workers. If no process comes in some places, the job continues without
    these as soon as the others are enough.
    """
    missing = frozenset(peer for peer in world.dead if peer.role == "worker")
    servers = frozenset(world.dead - missing)
    needed = servers if len(servers) == world.servers else frozenset[Peer]()
    fewer = Transition(
        source, needed, missing, world.workers - len(missing), world.servers - len(servers - needed)
    )
    in_vain = world.worn_out | world.late
    least = target.least if in_vain or not world.stuck else max(target.least, 2)
    enough = _is_enough(fewer, target, least) and not in_vain & needed
    if not world.stuck:
        if ready := frozenset(world.dead & world.ready):
            return Transition(source, ready, frozenset(), world.workers, world.servers)
        if enough:
            return fewer if world.overdue or in_vain else None
        return None if world.dead - in_vain else _no_successor(world, target)
    if enough and (in_vain or not (target.waits or world.dead <= world.ready)):
        return fewer
    unreplaced = in_vain & servers
    transition = Transition(
        source,
        frozenset(world.dead - in_vain),
        missing & in_vain,
        world.workers - len(missing & in_vain),
        world.servers - len(unreplaced),
    )
    if in_vain and (
        not _is_enough(transition, target, least) or len(unreplaced) == world.servers > 0
    ):
        return _no_successor(world, target)
    return transition


def _is_enough(transition: Transition, target: Target, least: int) -> bool:
    """Return whether processes train without those that will be missing."""
    return target.movable and (not transition.missing or transition.workers >= max(least, 1))


def _no_successor(world: World, target: Target) -> Impossible:
    """Return why the others cannot continue without processes that get no successors."""
    if world.worn_out:
        return Impossible(min(world.worn_out), "processes died there too often")
    why = "no successor has come up"
    workers = world.workers - sum(peer.role == "worker" for peer in world.late)
    if target.movable and workers < max(target.least, 1):
        why += f", and at least {max(target.least, 1)} workers are needed"
    return Impossible(min(world.late), why)


def _away(world: World, target: Target, source: Source) -> Transition | None:
    """Return how processes leave nodes that will go; None while their successors start."""
    leaving, ready = frozenset(world.leaving), world.leaving <= world.ready
    if ready:
        return Transition(source, leaving, frozenset(), world.workers, world.servers)
    missing = frozenset(peer for peer in leaving if peer.role == "worker")
    workers = world.workers - len(missing)
    if world.full and leaving - missing <= world.ready and workers >= target.least:
        return Transition(source, leaving - missing, missing, workers, world.servers)
    return None


def _resized(world: World, target: Target, source: Source) -> Transition | None:
    """Return another number of workers or servers, or strategy, when its processes stand ready."""
    workers = min(world.workers + world.joining, target.workers)
    if target.servers > world.servers + world.opening:
        return None
    if (workers, target.servers) == (world.workers, world.servers) and not target.switched:
        return None
    return Transition(source, frozenset(), frozenset(), workers, target.servers)
