"""Taking stock after deaths: which processes live, where they stand, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.driver import Result
from steepest.core.messages.message import Peer, worker_peer
from steepest.core.messages.schema import reader_of
from steepest.core.strategies.strategy import Strategy
from steepest.core.system import system
from steepest.runtime.calls import has_answered
from steepest.runtime.cluster import Cluster
from steepest.runtime.diagnostics import update_error
from steepest.runtime.job_runtime import runtime
from steepest.runtime.recovery.change import Change
from steepest.runtime.state.job_state import JobState
from steepest.runtime.state.optimizer_state import OptimizerState
from steepest.runtime.state.snapshots import Snapshots
from steepest.runtime.state.transfer import StateTransfer
from steepest.runtime.survivors import Survivor, assemble

_WORD_SECONDS = 1.0  # that Ray's word on a death is waited for, because it names the cause
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 0.3  # for the answer of a process whose channel another process has seen closing


def find_dead(cluster: Cluster, accused: tuple[Peer, str] | None) -> dict[Peer, str]:
    """Ask all processes for a sign of life; return the dead, and the cause of each death.

    A process is dead when Ray says so, when it does not answer and another process has seen its
    channel closing, and when it has given no sign of life for `heartbeat` seconds. One that
    computes with Python's lock held has `DeadlineConfig.step` seconds to answer.

    Args:
        cluster: the job's processes.
        accused: a process whose channel has closed, if any, and why it is said to be dead.
    """
    began, signs, (suspect, why) = system().now(), cluster.signs, accused or (None, "")
    asked = {peer: runtime().call(actor, "lost_peers") for peer, actor in cluster.actors.items()}
    closed: set[Peer] = set()
    if suspect is not None:  # otherwise processes close channels because they get other roles
        closed = {suspect} | _processes_of(cluster, cluster.lost_peers())
    dead: dict[Peer, str] = {}
    while asked:
        for peer, ref in list(asked.items()):
            if (cause := cluster.deaths.cause(peer)) is not None:
                dead[peer] = cause
            elif has_answered(ref):
                if suspect is not None:
                    closed |= _processes_of(cluster, ref.get())
                if peer != suspect:
                    del asked[peer]
                continue
            else:
                passed, actor = system().now() - began, cluster.members[peer].actor
                grace = _WORD_SECONDS if peer == suspect else _GRACE_SECONDS
                cut_off = peer in closed and passed >= grace
                silent = signs.is_silent(actor) or passed >= cluster.run_config.deadlines.step
                if not (cut_off or silent):
                    continue
                cause = why if peer == suspect else "its channels closed"
                cause = cause if cut_off else cluster.silence_of(peer, signs.silence(actor))
                dead[peer] = cluster.deaths.declare(peer, cause)
            del asked[peer]
        if suspect in asked and system().now() - began >= _WORD_SECONDS:
            # its router ended a channel although the process answers
            del asked[suspect]
            dead[suspect] = cluster.deaths.declare(suspect, why)
        if asked:
            signs.look(cluster.living())
            waiting = [call for call in asked.values() if not call.done()]
            cluster.owner.attend(_POLL_SECONDS, calls=waiting or None, number=1)
    return dead


def take_stock(
    cluster: Cluster,
    transfer: StateTransfer,
    snapshots: Snapshots,
    change: Change,
    dead: Mapping[Peer, str],
    config: Strategy,
) -> JobState:
    """Stop the survivors; return the state with which the job continues under a strategy.

    Raises:
        PeerLostError: a chunk has no holder and no copy.
        ModelRaisedError: the optimizer raised in the middle of an update, and there is no copy.
    """
    torn = cluster.client.torn
    standing = _standing(cluster, transfer, change, dead, config)
    if standing is None:
        if (copy := snapshots.taken) is not None:
            return copy
        if torn is not None:
            raise update_error(torn, cluster.places, None)
        peer, cause = next(iter(dead.items()))
        cluster.deaths.raise_lost(
            peer, f"{cause}; too many died together: of some chunks no copy is left"
        )
    living = {p.index: a for p, a in _living(cluster, dead).items() if p.role == "worker"}

    def call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        calls = [
            runtime().call(actor, "call", (0, -1), 0, function, *arguments)
            for actor in living.values()
        ]
        return cluster.get(calls, "tell its state", map(worker_peer, living))

    job = cluster.job
    step = job.step_of(standing.version)
    ledger = standing.state.get("ledger") if job.leases_samples else None
    optimizer = OptimizerState.collect(job, standing, living, step, call, ledger)
    return transfer.capture(standing, collected=optimizer)


def _standing(
    cluster: Cluster,
    transfer: StateTransfer,
    change: Change,
    dead: Mapping[Peer, str],
    config: Strategy,
) -> SharedState | None:
    """Stop the survivors; return where the state of all chunks is, or None if a copy must be used."""
    role = "worker" if cluster.job.servers_in_workers else "server"
    cluster.extend_deadline()
    whole = cluster.client.torn is None and not any(peer.role == role for peer in dead)
    if change.stopped is None and whole:
        change.stopped = transfer.stopped(config)
    change.halted = True
    cluster.disconnect()
    living = _living(cluster, dead)
    workers = [peer for peer in living if peer.role == "worker"]
    stopping = [runtime().call(living[peer], "give_up") for peer in workers]
    cluster.get(stopping, "stop", workers, after_step=True)
    cluster.extend_deadline()
    holding = [actor for peer, actor in living.items() if peer.role == role]
    return change.stopped or _salvage(cluster, holding)


def _salvage(cluster: Cluster, holding: list[Any]) -> SharedState | None:
    """Return servers' state at one version, in the processes that hold chunks; None if a chunk is lost."""
    if cluster.job.replication == 1 or not holding:
        return None
    names = cluster.names(holding)
    hearing = [runtime().call(actor, "heard") for actor in holding]
    heard = runtime().put(cluster.get(hearing, "say what it has heard", names))
    since = cluster.client.position.version
    telling = [runtime().call(actor, "state_of", heard, since) for actor in holding]
    parts: list[Survivor] = cluster.get(telling, "catch up", names)
    newest = max(parts, key=lambda part: part.position)
    for data in newest.results:  # the coordinator may have died before it sent these
        result = reader_of(Result).read(data, cluster.job.limits)
        assert isinstance(result, Result)
        cluster.client.outcomes.put(result)
    return assemble(len(cluster.job.holders), dict(zip(holding, parts, strict=True)))


def _living(cluster: Cluster, dead: Mapping[Peer, str]) -> dict[Peer, Any]:
    return {peer: actor for peer, actor in cluster.actors.items() if peer not in dead}


def _processes_of(cluster: Cluster, peers: Iterable[Peer]) -> set[Peer]:
    """Return the processes in which some roles live; not those of clients and collectives."""
    roles = ("worker", "server", "coordinator")
    return {cluster.process_of(peer) for peer in peers if peer.role in roles}
