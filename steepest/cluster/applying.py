"""A transition is applied: the processes that it names become the job, with the state that there is."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import ray

from steepest.cluster.growth import Absent
from steepest.cluster.job_state import JobState
from steepest.cluster.launch import Cluster
from steepest.cluster.membership import Membership
from steepest.cluster.observation import Observation
from steepest.cluster.starting import Start
from steepest.cluster.stock import Stock
from steepest.config.strategies import StrategyConfig
from steepest.elastic.decision import Transition, World
from steepest.engine.job import check_agreement
from steepest.errors import DeadlineError
from steepest.messages.message import Peer, server_peer, worker_peer

#: Of workers, by role.
Seats = Mapping[Peer, int]


@dataclass(frozen=True)
class Applied:
    """What was done, for the line that tells of it.

    Attributes:
        transition: what was applied.
        dead: the dead processes.
        joined: the processes of further workers, by number.
        then: what becomes of workers that were left out, in words.
    """

    transition: Transition
    dead: Collection[Peer]
    joined: Mapping[int, Start]
    then: str

    @property
    def replaced(self) -> int:
        """How many dead processes have successors now, or are done without for good."""
        returned = sum(bool(start.cause) for start in self.joined.values())
        if self.transition.replaced or self.transition.left:
            return returned + len(self.transition.replaced & set(self.dead))
        return returned + len(self.dead)


class Applying:
    """Puts a job together of other processes.

    Args:
        cluster: the job's processes.
        state: of the job.
        observation: the processes that were started for it.
    """

    def __init__(self, cluster: Cluster, state: JobState, observation: Observation) -> None:
        self._cluster = cluster
        self._state = state
        self._observation = observation

    def apply(
        self, transition: Transition, world: World, dead: Mapping[Peer, str], stock: Stock
    ) -> Applied:
        """Put the job together of the processes that a transition names.

        Args:
            transition: what was decided.
            world: for which it was decided.
            dead: the dead, and why they died.
            stock: with which the job continues.

        Raises:
            PeerLostError, DeadlineError: another process died, or did not come up. If the old job
                is no more by then, `JobState.pending` is what to begin again with.
            ModelError, ModelRaisedError: a successor could not build the job's model.
        """
        cluster = self._cluster
        successors = self._successors(transition, dead)
        staying = [
            peer.index
            for peer in sorted(cluster.actors)
            if peer.role == "worker" and peer not in dead and peer not in transition.left
        ]
        more = transition.workers - len(staying) - sum(p.role == "worker" for p in dead)
        joined = self._observation.joining() if more > 0 and not dead else {}
        # after deaths the job goes on as it was: another strategy, if one is wanted, comes next
        wished = not dead and not successors and not transition.left and self._state.pending is None
        before = cluster.job if stock.found.holders is None else stock.copy.job
        config = self._observation.config_for(
            transition.workers, transition.servers, None if wished else before.config
        )
        wanted = self._membership(transition, config, dead, staying, successors, joined)
        changed = transition.replaced | transition.left
        seats = {peer: cluster.seat_of(peer) for peer in changed if peer.role == "worker"}
        stock = stock.only_in([actor for peer, actor in cluster.actors.items() if peer not in dead])
        as_it_was = (
            self._state.pending is None
            and stock.copy.job is cluster.job
            and not transition.left
            and transition.workers == world.workers
        )
        same_servers = transition.servers == world.servers and config == cluster.job.config
        # then version and samples' places stay, in the middle of a step too
        as_before = as_it_was and (bool(dead) or same_servers)
        if as_before:
            self._state.put_back(stock, wanted)
        else:
            self._state.put_together(stock, wanted)
        self._observation.starting.joined(cluster.actors.values())
        then = self._follow(transition, world, dead, seats)
        return Applied(transition, dead.keys(), joined, then)

    def _successors(self, transition: Transition, dead: Mapping[Peer, str]) -> dict[Peer, Start]:
        """Return the processes that take the places of others, when all are up."""
        observation, instead = self._observation, self._observation.starting.instead
        replaced = {peer: dead.get(peer, "") for peer in transition.replaced}
        deadline = time.monotonic() + 5 * self._cluster.run_config.deadlines.start
        while True:
            observation.start_successors(replaced, cold=True)
            starts = {peer: instead[peer] for peer in replaced}
            late = [peer for peer, start in starts.items() if not start.is_up]
            if not late:
                break
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the successor of {late[0]} did not come up in time: raise "
                    "DeadlineConfig(start=...)"
                )
            calls = [call for peer in late for call in starts[peer].building]
            ray.wait(calls, num_returns=len(calls), timeout=0.1)
        workers = {peer: start for peer, start in starts.items() if peer.role == "worker"}
        calls = [start.building[0] for start in workers.values()]
        self._cluster.extend_deadline()
        found = self._cluster.get(calls, "build the model again", *workers)
        for described in found:
            check_agreement(self._cluster.job.description, described, "the job", "a successor")
        return starts

    def _membership(
        self,
        transition: Transition,
        config: StrategyConfig,
        dead: Mapping[Peer, str],
        staying: Sequence[int],
        successors: Mapping[Peer, Start],
        joined: Mapping[int, Start],
    ) -> Membership:
        """Return the processes of which the job is put together.

        Args:
            transition: what was decided.
            config: the strategy.
            dead: the dead.
            staying: the workers that live, and are not left out; some may be replaced.
            successors: processes in the places of others.
            joined: further workers, by their new numbers.
        """
        cluster, added = self._cluster, dict(successors)
        keep = {i: i for i in staying if worker_peer(i) not in successors}
        if transition.left or joined or transition.workers < len(staying):
            numbers = [new for new in range(transition.workers) if new not in joined]
            keep = dict(zip(numbers, staying, strict=False))
            added |= {worker_peer(new): start for new, start in joined.items()}
        servers = [peer for peer in cluster.actors if peer.role == "server"]
        have = sum(peer not in dead or peer in successors for peer in servers)
        further = [start for start in self._observation.starting.servers if start.is_up]
        numbered = zip(range(have, transition.servers), further, strict=False)
        added |= {server_peer(index): start for index, start in numbered}
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
            gone=frozenset(dead),
        )

    def _follow(
        self, transition: Transition, world: World, dead: Mapping[Peer, str], seats: Seats
    ) -> str:
        """Note what follows from a transition that was applied; return it in words, if it is news.

        Args:
            transition: what was applied.
            world: for which it was decided.
            dead: the dead, and why they died.
            seats: of the workers that were replaced or left out.
        """
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
                    cluster.placement.retire(seat)
                self._observation.reserve.leave(leaving.nodes)
            leaving.end()
        starting.give_up(list(starting.instead.values()))
        return cluster.placement.leave_out(worn_out) if transition.left & dead.keys() else ""
