"""A successor takes a dead worker's place while the others stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from functools import partial
from typing import Any

from steepest.core.data.streams import StreamPlace
from steepest.core.engine.replica_states import all_states, merged_states
from steepest.core.engine.replicas import Replicas
from steepest.core.messages.message import Peer, worker_peer
from steepest.core.system import system
from steepest.core.tensors.dtypes import Tensors
from steepest.errors import DeadlineError, PeerLostError
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import runtime
from steepest.runtime.places import Place
from steepest.runtime.recovery.decision import Transition
from steepest.runtime.recovery.observation import NOTICE_SECONDS, Observation
from steepest.runtime.recovery.starting import Start
from steepest.runtime.recovery.telling import nothing_lost, record_line

_LOOK_SECONDS = 0.1


class Joining:
    """Lets successors join a job whose workers hold nothing that others need."""

    def __init__(self, cluster: Cluster, observation: Observation) -> None:
        self._cluster = cluster
        self._observation = observation
        self._joined: dict[Peer, int] = {}  # successors, and the version when they joined

    def join(self, transition: Transition, dead: Mapping[Peer, str]) -> int | None:
        """Have successors take dead workers' places while the others stay; return how many did.

        They are fewer if a process died meanwhile. None if it cannot be done so: a successor runs
        on another node than its predecessor, and then who shares a host with whom changes.
        """
        cluster, starting = self._cluster, self._observation.starting
        starts = {peer: starting.instead[peer] for peer in sorted(transition.replaced)}
        places = cluster.places
        moved = [p for p, start in starts.items() if start.place.node != places[p].node]
        if transition.missing or moved:
            return None
        missing = set(dead)
        for peer, start in starts.items():
            old, step, began = cluster.members[peer].place, cluster.step + 1, system().now()
            try:
                self._join(peer, start, missing)
            except BaseException as error:
                died = isinstance(error, (PeerLostError, DeadlineError))
                explained = died and self._has_died(peer, start, missing)
                starting.give_up([start])
                if explained:
                    break
                raise
            missing.remove(peer)
            starting.joined([start.actor])
            self._tell_of(peer, start, old, step, began)
        cluster.await_successors(missing)
        self._observation.fill_reserve()
        return len(dead) - len(missing)

    def _has_died(self, peer: Peer, start: Start, missing: Set[Peer]) -> bool:
        """Return whether a process that was about to join, or another process of the job, is dead.

        Args:
            missing: the processes that are known to be dead; one that has just joined is not among them.
        """
        observation, watches = self._observation, self._cluster.watches
        patience = max(NOTICE_SECONDS, 4 * self._cluster.run_config.failure.heartbeat)
        deadline = system().now() + patience
        while system().now() < deadline:
            observation.ask_for_signs()  # one may be cut off
            if start.is_dead:
                observation.failed_to_start(peer)
                return True
            if observation.dead().keys() - missing:
                return True
            alive = [watch for other, watch in watches.items() if other not in missing]
            self._cluster.owner.attend(_LOOK_SECONDS, calls=[start.watch, *alive], number=1)
        return False

    def _tell_of(self, peer: Peer, start: Start, old: Place, step: int, began: float) -> None:
        """Log that a successor has joined; it began to at the time `began`."""
        cluster, now = self._cluster, system().now()
        pid = cluster.members[peer].place.pid
        took = now - start.began
        repeated = "the step is taken again" if cluster.job.needs_all else "the others went on"
        cluster.note(
            "replaced",
            f"{peer} on {old.host} (pid {old.pid}) died in step {step}: {start.cause}; "
            f"pid {pid} has taken its place after {took:.1f} s; {repeated}, "
            f"{nothing_lost(cluster.job, [peer])}",
            record_line(
                f"a successor joins at step {step - 1}",
                f"{peer} on {old.host} ({start.cause}) died",
                "the others hold all of the state",
                f"pid {pid} in the place of {peer}; the others stay as they are",
                cluster.job,
                {"starting": began - start.began, "joining": now - began, "in all": took},
                (0, 0),
            ),
        )

    def _join(self, peer: Peer, start: Start, missing: Collection[Peer]) -> None:
        """Let a process that is up, on its predecessor's node, take a worker's place."""
        cluster, actor = self._cluster, start.actor
        cluster.extend_deadline()
        life, timeout = cluster.members[peer].life + 1, cluster.run_config.deadlines.start
        self._observation.starting.check_models({peer: start})

        def get(call: Any, what: str) -> Any:
            return cluster.get([call], what, [peer])[0]

        place = get(start.building[-1], "say where it is")
        states = self._states_of_the_others(missing)
        mean = merged_states(states, cluster.job.description) if states else None
        get(
            runtime().call(actor, "bind", cluster.stored_job, cluster.chosen.gpu),
            "bind the model again",
        )
        address = get(
            runtime().call(actor, "open", cluster.stored_job, [], None, life), "open a worker again"
        )
        where = self._place_of_the_others(missing)
        get(
            runtime().call(actor, "take_state", *cluster.plan, mean, where),
            "take the others' state",
        )
        get(runtime().call(actor, "connect", cluster.ends, timeout), "connect a worker again")
        cluster.substitute(peer, actor, place, address)
        self._joined[peer] = cluster.client.position.version
        self._tell([worker for worker in self._living() if worker not in missing or worker == peer])

    def _living(self) -> list[Peer]:
        cluster = self._cluster
        workers = map(worker_peer, range(cluster.job.num_workers))
        return [peer for peer in workers if cluster.deaths.cause(peer) is None]

    def _states_of_the_others(self, missing: Collection[Peer]) -> list[Tensors]:
        """Return the buffers of all workers' replicas that have weights; of all, if none is known to."""
        version = self._cluster.client.position.version
        others = [peer for peer in self._living() if peer not in missing]
        # before the first step nobody may have weights, and a server may send them only when all workers have joined
        having = [peer.index for peer in others if version and self._joined.get(peer, -1) < version]
        call = self._cluster.workers.call
        if having:
            return all_states(partial(call, workers=having))
        those = [peer.index for peer in others]
        return all_states(partial(call, workers=those, waits=False)) if those else []

    def _place_of_the_others(self, missing: Collection[Peer]) -> StreamPlace | None:
        """Return where the job is in its pass over a stream; None without one."""
        others = [peer.index for peer in self._living() if peer not in missing]
        if self._cluster.plan[0] is not None or not others:
            return None
        ask = partial(self._cluster.workers.call, waits=False, workers=others[:1])
        place: StreamPlace | None = ask(Replicas.stream_place)[0]
        return place

    def _tell(self, workers: Collection[Peer]) -> None:
        """Tell workers where all others listen; a worker that dies meanwhile is left out."""
        cluster, actors = self._cluster, self._cluster.actors
        calls = {
            peer: runtime().call(actors[peer], "join", cluster.stored_job, cluster.listening)
            for peer in workers
        }
        for peer, call in calls.items():
            try:
                cluster.get([call], "join again", [peer], after_step=True)
            except PeerLostError:
                cluster.owner.attend(NOTICE_SECONDS, calls=[cluster.members[peer].watch])
                if cluster.deaths.cause(peer) is None:
                    raise
