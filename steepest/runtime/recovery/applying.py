"""Applies a transition: the processes that it names become the job, with the existing state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from steepest.core.messages.message import Peer, server_peer, worker_peer
from steepest.core.strategies.strategy import Strategy
from steepest.errors import DeadlineError, PeerLostError
from steepest.runtime.cluster import Cluster
from steepest.runtime.context import Lineup
from steepest.runtime.recovery.change import Applied, Change
from steepest.runtime.recovery.decision import Transition, World
from steepest.runtime.recovery.growth import Missing
from steepest.runtime.recovery.observation import Observation
from steepest.runtime.recovery.starting import Start
from steepest.runtime.state.transfer import StateTransfer


class Applying:
    """Reassembles a job from other processes."""

    def __init__(self, cluster: Cluster, transfer: StateTransfer, observation: Observation) -> None:
        self._cluster = cluster
        self._transfer = transfer
        self._observation = observation

    def apply(
        self, change: Change, transition: Transition, world: World, dead: Mapping[Peer, str]
    ) -> None:
        """Reassemble the job from the processes that a transition names.

        `change.applied` has it as soon as the old job is no more. Where this raises after that,
        `StateTransfer.pending` is what to begin again with.
        """
        cluster, transfer, observation = self._cluster, self._transfer, self._observation
        assert change.state is not None
        state, replaced, missing = change.state, transition.replaced, transition.missing
        workers = [peer for peer in sorted(cluster.members) if peer.role == "worker"]
        staying = [peer for peer in workers if peer not in missing]
        more = transition.workers > len(staying) and not dead
        joined = observation.joining() if more else {}
        free = [number for number in range(transition.workers) if number not in joined]
        numbers = dict(zip(staying, free, strict=False))
        successors = self._successors({p: dead.get(p, "") for p in sorted(replaced)}, numbers)
        # after deaths the job goes on as it was: another strategy, if one is wanted, comes next
        wished = not (dead or replaced or missing or state.copied or transfer.pending)
        before = cluster.job if state.shared.holders is None else state.job
        config = observation.config_for(
            transition.workers, transition.servers, None if wished else before.config
        )
        wanted = replace(
            self._membership(transition, config, dead, numbers, successors, joined),
            # no model freezes again what it has begun to train, in a change that a death ended, say
            unfrozen=cluster.unfrozen if wished else before.unfrozen | cluster.begun_to_train,
        )
        seats = {peer: cluster.seat_of(peer) for peer in workers if peer in replaced | missing}
        state = state.only_in(cluster.living())
        same = transfer.pending is None and state.job is cluster.job and not missing
        same &= transition.workers == world.workers and wanted.unfrozen == cluster.job.unfrozen
        same_servers = transition.servers == world.servers and config == cluster.job.config
        # then version and samples' places stay, in the middle of a step too
        as_before = same and (bool(dead) or same_servers)
        members = cluster.members
        try:
            transfer.put_together(state, wanted, as_before=as_before)
        finally:
            if cluster.members is not members:  # also where another death has ended it too early
                observation.starting.joined(cluster.actors.values())
                then = self._follow(transition, world, dead, seats)
                change.applied.append(Applied(transition, dead.keys(), joined, then))

    def _successors(
        self, replaced: Mapping[Peer, str], numbers: Mapping[Peer, int]
    ) -> dict[Peer, Start]:
        """Return the processes that take the places of others, when all are up."""
        observation, starting = self._observation, self._observation.starting
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
            self._cluster.owner.attend(0.1, calls=calls)
            # for silent ones among the successors others start
            silent, _ = observation.ask_for_signs(changing=True)
            if silent:
                raise PeerLostError(f"{', '.join(silent)} gave no sign of life")
        self._cluster.extend_deadline()
        workers = {peer: start for peer, start in starts.items() if peer.role == "worker"}
        starting.check_models(workers)
        return starts

    def _membership(
        self,
        transition: Transition,
        config: Strategy,
        dead: Mapping[Peer, str],
        numbers: Mapping[Peer, int],
        successors: Mapping[Peer, Start],
        joined: Mapping[int, Start],
    ) -> Lineup:
        """Return the processes that will form the job."""
        keep = {new: old.index for old, new in numbers.items() if old not in successors}
        servers = [
            peer
            for peer in sorted(self._cluster.members)
            if peer.role == "server" and (peer not in dead or peer in successors)
        ]
        further = [start for start in self._observation.starting.servers if start.is_up]
        more = zip(range(len(servers), transition.servers), further, strict=False)
        added = {worker_peer(new): start for new, start in joined.items()}
        added |= {server_peer(new): start for new, start in more}
        roles = {old: worker_peer(new) for old, new in numbers.items()}
        roles |= {old: server_peer(new) for new, old in enumerate(servers)}
        added |= {roles[old]: start for old, start in successors.items()}
        return Lineup(
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
        self,
        transition: Transition,
        world: World,
        dead: Mapping[Peer, str],
        seats: Mapping[Peer, int],
    ) -> str:
        """Note the consequences of an applied transition; return them in words if they are news."""
        cluster, starting = self._cluster, self._observation.starting
        leaving, worn_out = self._observation.leaving, []
        for peer in sorted(transition.missing & dead.keys()):
            if peer in world.worn_out:
                worn_out.append(seats[peer])
            elif (start := starting.instead.pop(peer, None)) is not None:
                starting.workers.append(start)
            else:
                self._observation.growth.missing.append(
                    Missing(peer.index, seats[peer], dead[peer])
                )
        if leaving.nodes:
            if not dead:
                for seat in seats.values():
                    cluster.placement.leave(seat)
                self._observation.reserve.leave(leaving.nodes)
            leaving.end()
        starting.give_up(list(starting.instead.values()))
        return cluster.placement.leave_out(worn_out) if transition.missing & dead.keys() else ""
