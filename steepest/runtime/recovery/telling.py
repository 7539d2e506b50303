"""The lines that tell the user of changes of a job's processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from steepest.core.engine.job import Job
from steepest.core.messages.message import Peer, worker_peer
from steepest.core.system import system
from steepest.errors import listed
from steepest.runtime.cluster import Cluster
from steepest.runtime.recovery.change import Applied, Change
from steepest.tables.job.job_tables import delays_rows


def tell(cluster: Cluster, change: Change, number: int, lost: int) -> None:
    """Log what was done; as a warning if a process died, or fewer are there than before."""
    applied, before, said = change.applied[-1], change.job, list(change.said.values())
    job, transition, record = cluster.job, applied.transition, record_of(cluster, change, number)
    sizes = f"{job.global_batch} samples a step, from step {cluster.step + 1} on"
    took = f"training stopped for {system().now() - change.began:.2f} s"
    then = ", and made again" if change.client.torn is None else ""
    if said:
        what = f"{lost} updates since the last copy are lost{then}" if lost else ""
        kind, line = _of_deaths(cluster, applied, before, said, what, sizes, took)
    elif transition.replaced or transition.missing:
        who = ", ".join(map(str, sorted(transition.replaced | transition.missing)))
        line = f"{change.hosts}: {who} moved away; {job.num_workers} workers, {sizes}; {took}"
        kind = "moved"
    elif applied.joined and any(start.cause for start in applied.joined.values()):
        places, joined = cluster.places, map(worker_peer, applied.joined)
        who = ", ".join(f"{peer} (pid {places[peer].pid})" for peer in joined)
        after = system().now() - min(start.began for start in applied.joined.values())
        line = f"{who} is there again, after {after:.1f} s: {job.num_workers} workers, {sizes}"
        kind, line = "returned", f"{line}; {took}"
    elif (job.num_workers, job.num_servers) != (before.num_workers, before.num_servers):
        kind = "resized"
        line = (
            f"{job.num_workers} workers and {job.num_servers} servers instead of "
            f"{before.num_workers} and {before.num_servers}, {sizes}; {took}"
        )
    else:
        kind, line = "changed", ""
    cluster.note(kind, line, record)


def record_of(cluster: Cluster, change: Change, number: int) -> str:
    """Return the record of a change that was applied, in one line."""
    steps = max(change.step - cluster.step, 0)
    return record_line(
        f"change {number} at step {change.step}",
        _cause(cluster, change),
        f"{len(change.said)} of {len(change.names)} processes dead; {_source(change)}",
        _decision(change),
        cluster.job,
        change.seconds | {"in all": system().now() - change.began},
        (steps, steps * change.job.global_batch),
    )


def record_line(
    what: str,
    cause: str,
    seen: str,
    decision: str,
    job: Job,
    seconds: Mapping[str, float],
    repeated: tuple[int, int],
) -> str:
    """Return the line of a record."""
    took = ", ".join(f"{name} {passed:.2f}" for name, passed in seconds.items())
    return (
        f"{what} | cause: {cause} | seen: {seen} | decision: {decision} | processes: "
        f"{job.num_workers} workers, {job.num_servers} servers, "
        f"{job.config.name} | seconds: {took} | repeated: {repeated[0]} steps, "
        f"{repeated[1]} samples"
    )


def _cause(cluster: Cluster, change: Change) -> str:
    """Return why a change was made."""
    before, job, torn = change.job, cluster.job, change.client.torn
    causes = [f"{', '.join(change.said.values())} died"] if change.said else []
    causes += ["the optimizer raised"] if torn is not None else []
    if not causes and change.hosts:
        causes = [change.hosts]
    if before.config != job.config and not change.said:
        causes.append(f"{job.config.name} instead of {before.config.name} was asked for")
    if before.unfrozen != job.unfrozen:
        causes.append("parameters were unfrozen")
    if before.num_workers != job.num_workers and not causes:
        causes.append(f"{job.num_workers} workers instead of {before.num_workers} are wanted")
    return "; ".join(causes) or "processes were to get their roles anew"


def _source(change: Change) -> str:
    """Return in words where the state is with which a job continues."""
    if change.state is None or change.state.copied:
        return "the newest state is lost"
    return "the living hold all of the state"


def _decision(change: Change) -> str:
    """Return in words what was done, by each attempt."""
    parts_of_tries = []
    for applied in change.applied:
        made = applied.transition
        parts = (
            [f"others in the places of {listed(sorted(made.replaced))}"] if made.replaced else []
        )
        parts += [f"go on without {listed(sorted(made.missing))}"] if made.missing else []
        joined = len(applied.joined)
        parts += [f"{joined} workers join" if joined > 1 else "1 worker joins"] if joined else []
        state = "the driver's copy" if made.source == "snapshot" else "the processes' own state"
        parts_of_tries.append(f"{', '.join(parts) or 'roles are given anew'}, with {state}")
    return "; then, because of another death, ".join(parts_of_tries)


def nothing_lost(job: Job, dead: Collection[Peer]) -> str:
    """Return in words that deaths have cost no update, and what else they have cost."""
    workers = [str(peer) for peer in sorted(dead) if peer.role == "worker"]
    if not workers or not delays_rows(job):
        return "no update and no sample is lost"
    return (
        "no update and no sample is lost, except the gradients of rows of at most one step, which "
        f"{' and '.join(workers)} had not pushed"
    )


def _of_deaths(
    cluster: Cluster,
    applied: Applied,
    before: Job,
    said: Sequence[str],
    lost: str,
    sizes: str,
    took: str,
) -> tuple[str, str]:
    """Return kind and line of a change that followed deaths, see `tell`; `lost` is in words, "" for none."""
    job, transition = cluster.job, applied.transition
    what = lost or nothing_lost(before, applied.dead)
    who = f"{', '.join(said)} died"
    fewer = job.num_workers < before.num_workers  # also where a set-back has given roles anew
    left = [f"{job.num_workers} workers"] if transition.missing or fewer else []
    if transition.servers and job.num_servers < before.num_servers:
        left.append(f"{job.num_servers} servers, which took over")
    then = f"{applied.then}; " if applied.then else ""
    going_on = f"; going on with {' and '.join(left)}, {sizes}; {then}"
    if transition.replaced:
        took_over = f"others took over what they held at step {cluster.step + 1}"
        return "recovered", f"{who}; {took_over}{going_on if fewer else ', '}{what}; {took}"
    return "left", f"{who}{going_on}{what}; {took}"
