"""A transition is applied: the processes that it names become the job, with the state that there is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from steepest.config.strategies import StrategyConfig
from steepest.engine.job import check_agreement
from steepest.errors import DeadlineError, PeerLostError
from steepest.messages.message import Peer, server_peer, worker_peer
from steepest.recovery.decision import Transition, World
from steepest.recovery.growth import Absent
from steepest.recovery.observation import Observation
from steepest.recovery.starting import Start
from steepest.runtime.context import Membership
from steepest.runtime.launch import Cluster
from steepest.state.job_state import JobState
from steepest.state.stock import Stock

#: Of workers, by role.
Seats = Mapping[Peer, int]


@dataclass(frozen=True)
class Applied:
    """What was done, for the line that tells of it."""

    transition: Transition
    dead: Collection[Peer]
    joined: Mapping[int, Start]  # further workers, by number
    then: str  # what becomes of workers that were left out, in words

    @property
    def replaced(self) -> int:
        """How many dead processes have successors now, or are done without for good."""
        returned = sum(bool(start.cause) for start in self.joined.values())
        if self.transition.replaced or self.transition.left:
            return returned + len(self.transition.replaced & set(self.dead))
        return returned + len(self.dead)


class Applying:
    """Puts a job together of other processes."""

    def __init__(self, cluster: Cluster, state: JobState, observation: Observation) -> None:
        self._cluster = cluster
        self._state = state
        self._observation = observation

    def apply(
        self,
        transition: Transition,
        world: World,
        dead: Mapping[Peer, str],
        stock: Stock,
        applied: list[Applied],
    ) -> None:
        """Put the job together of the processes that a transition names.

        `applied` is appended to as soon as the old job is no more. Where this raises after that,
        `JobState.pending` is what to begin again with.
        """
        cluster = self._cluster
        staying = [
            peer
            for peer in sorted(cluster.actors)
            if peer.role == "worker" and peer not in transition.left
        ]
        more = transition.workers > len(staying) and not dead
        joined = self._observation.joining() if more else {}
        free = [number for number in range(transition.workers) if number not in joined]
        numbers = dict(zip(staying, free, strict=False))
        successors = self._successors(transition, dead, numbers)
        # after deaths the job goes on as it was: another strategy, if one is wanted, comes next
        wished = not (dead or successors or transition.left or stock.copied or self._state.pending)
        before = cluster.job if stock.found.holders is None else stock.copy.job
        config = self._observation.config_for(
            transition.workers, transition.servers, None if wished else before.config
        )
        wanted = self._membership(transition, config, dead, numbers, successors, joined)
        wanted = replace(wanted, unfrozen=cluster.unfrozen if wished else before.unfrozen)
        changed = transition.replaced | transition.left
        seats = {peer: cluster.seat_of(peer) for peer in changed if peer.role == "worker"}
        stock = stock.only_in(cluster.living())
        as_it_was = (
            self._state.pending is None
            and stock.copy.job is cluster.job
            and not transition.left
            and transition.workers == world.workers
        )
        same_servers = transition.servers == world.servers and config == cluster.job.config
        same_servers &= wanted.unfrozen == cluster.job.unfrozen
        # then version and samples' places stay, in the middle of a step too
        as_before = as_it_was and (bool(dead) or same_servers)
        put = self._state.put_back if as_before else self._state.put_together
        actors = cluster.actors
        try:
            put(stock, wanted)
        finally:
            if cluster.actors is not actors:  # also where another death has ended it too early
                self._observation.starting.joined(cluster.actors.values())
                then = self._follow(transition, world, dead, seats)
                applied.append(Applied(transition, dead.keys(), joined, then))

    def _successors(
        self, transition: Transition, dead: Mapping[Peer, str], numbers: Mapping[Peer, int]
    ) -> dict[Peer, Start]:
        """Return the processes that take the places of others, when all are up."""
        observation, starting = self._observation, self._observation.starting
        replaced = {peer: dead.get(peer, "") for peer in transition.replaced}
        while True:
            observation.start_successors(replaced, cold=True)
            starts = {peer: starting.instead[peer] for peer in replaced}
            starts |= {p: starting.fitting(starts[p], numbers[p]) for p in replaced if p in numbers}
            starting.instead |= starts
            late = [peer for peer, start in starts.items() if not start.is_up]
            if not late:
                break
            if observation.late(late):
                raise DeadlineError(
                    f"the successor of {late[0]} did not come up within "
                    f"{starting.patience:g} s: raise DeadlineConfig(start=...)"
                )
            calls = [call for peer in late for call in starts[peer].building]
            self._cluster.owner.await_calls(calls, 0.1)
            # for silent ones among the successors others start
            silent, _ = observation.ask_for_signs(changing=True)
            if silent:
                raise PeerLostError(f"{', '.join(silent)} gave no sign of life")
        workers = {peer: start for peer, start in starts.items() if peer.role == "worker"}
        calls = [start.building[0] for start in workers.values()]
        self._cluster.extend_deadline()
        found = self._cluster.get(calls, "build the model again", workers)
        for described in found:
            check_agreement(self._cluster.job.description, described, "the job", "a successor")
        return starts

    def _membership(
        self,
        transition: Transition,
        config: StrategyConfig,
        dead: Mapping[Peer, str],
        numbers: Mapping[Peer, int],
        successors: Mapping[Peer, Start],
        joined: Mapping[int, Start],
    ) -> Membership:
        """Return the processes of which the job is put together."""
        keep = {new: old.index for old, new in numbers.items() if old not in successors}
        servers = [
            peer
            for peer in sorted(self._cluster.actors)
            if peer.role == "server" and (peer not in dead or peer in successors)
        ]
        further = [start for start in self._observation.starting.servers if start.is_up]
        more = zip(range(len(servers), transition.servers), further, strict=False)
        added = {worker_peer(new): start for new, start in joined.items()}
        added |= {server_peer(new): start for new, start in more}
        roles = {old: worker_peer(new) for old, new in numbers.items()}
        roles |= {old: server_peer(new) for new, old in enumerate(servers)}
        added |= {roles[old]: start for old, start in successors.items()}
        return Membership(
            config,
            transition.workers,
            keep,
            {peer: start.actor for peer, start in added.items()},
            {
                p.index: s.seat
                for p, s in added.items()
                if p.role == "worker" and s.seat is not None
            },
            gone=frozenset([*dead, *(peer for peer in successors if peer.role == "server")]),
        )

    def _follow(
        self, transition: Transition, world: World, dead: Mapping[Peer, str], seats: Seats
    ) -> str:
        """Note what follows from a transition that was applied; return it in words, if it is news."""
        cluster, starting = self._cluster, self._observation.starting
        leaving, worn_out = self._observation.leaving, []
        for peer in sorted(transition.left & dead.keys()):
            if peer in world.worn_out:
                worn_out.append(seats[peer])
            elif (start := starting.instead.pop(peer, None)) is not None:
                starting.workers.append(start)
            else:
                self._observation.growth.absent.append(Absent(peer.index, seats[peer], dead[peer]))
        if leaving.nodes:
            if not dead:
                for seat in seats.values():
                    cluster.placement.leave(seat)
                self._observation.reserve.leave(leaving.nodes)
            leaving.end()
        starting.give_up(list(starting.instead.values()))
        return cluster.placement.leave_out(worn_out) if transition.left & dead.keys() else ""
