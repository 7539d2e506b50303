"""The lines that tell the user of changes of a job's processes."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from steepest.cluster.applying import Applied
from steepest.cluster.launch import Cluster
from steepest.engine.job import Job
from steepest.messages.message import Peer, worker_peer


def tell(
    cluster: Cluster,
    applied: Applied,
    before: Job,
    said: Sequence[str],
    lost: int,
    hosts: str,
    began: float,
    *,
    again: bool,
) -> None:
    """Note what was done, unless the number of processes is as before and none has died.

    Args:
        cluster: the job's processes.
        applied: what was done.
        before: the job that it was.
        said: of each dead process, what it was, and why it died.
        lost: updates that are lost.
        hosts: addresses of nodes that were left, and why.
        began: when the change began, of `time.monotonic`.
        again: whether lost updates are made again; not where the optimizer raised.
    """
    job, transition = cluster.job, applied.transition
    sizes = f"{job.global_batch} samples a step, from step {cluster.step + 1} on"
    took = f"training stopped for {time.monotonic() - began:.2f} s"
    then = ", and made again" if again else ""
    if said:
        cluster.note(
            *_of_deaths(
                cluster,
                applied,
                before,
                said,
                f"{lost} updates since the last copy are lost{then}" if lost else "",
                sizes,
                took,
            )
        )
    elif transition.replaced or transition.left:
        who = ", ".join(map(str, sorted(transition.replaced | transition.left)))
        line = f"{hosts}: {who} moved away; {job.num_workers} workers, {sizes}; {took}"
        cluster.note("moved", line)
    elif applied.joined and any(start.cause for start in applied.joined.values()):
        who = ", ".join(
            f"{worker_peer(i)} (pid {cluster.places[worker_peer(i)].pid})" for i in applied.joined
        )
        after = time.monotonic() - min(start.began for start in applied.joined.values())
        line = f"{who} is there again, after {after:.1f} s: {job.num_workers} workers, {sizes}"
        cluster.note("returned", f"{line}; {took}")
    elif (job.num_workers, job.num_servers) != (before.num_workers, before.num_servers):
        cluster.note(
            "resized",
            f"{job.num_workers} workers and {job.num_servers} servers instead of "
            f"{before.num_workers} and {before.num_servers}, {sizes}; {took}",
        )


def nothing_lost(job: Job, dead: Collection[Peer]) -> str:
    """Return in words that deaths have cost no update, with what they have cost all the same.

    Args:
        job: as it was.
        dead: its dead processes.
    """
    workers = [str(peer) for peer in sorted(dead) if peer.role == "worker"]
    if not workers or not job.delays_rows:
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
    if transition.replaced:
        line = f"{who}; others took over what they held at step {cluster.step + 1}, {what}; {took}"
        return "recovered", line
    left = [f"{job.num_workers} workers"] if transition.left else []
    if transition.servers and job.num_servers < before.num_servers:
        left.append(f"{job.num_servers} servers, which took over")
    then = f"{applied.then}; " if applied.then else ""
    return "left", f"{who}; going on with {' and '.join(left)}, {sizes}; {then}{what}; {took}"
