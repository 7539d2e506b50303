"""Opens the roles of a job's processes, connects these, and moves chunks from one to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steepest.core.engine.job import Job
from steepest.core.messages.message import Peer, server_peer
from steepest.core.transport.channel import Address
from steepest.errors import PeerLostError
from steepest.runtime.context import JobContext
from steepest.runtime.job_runtime import runtime

#: The processes that have each chunk.
Holdings = Mapping[int, Sequence[Any]]


def connect_processes(context: JobContext, initial: Any) -> tuple[list[Address], list[Address]]:
    """Let a job's processes open their roles, and connect them; the driver connects afterwards.

    A worker connects to all processes that host servers. Of two of these the later one connects to
    the earlier one; unless servers send each other chunks, all but the first one connect to that
    one only, beside which the coordinator lives.

    Returns:
        Where the driver, and a worker that joins later, connect to; and, by worker, where it
        listens for other workers.
    """
    job, timeout = context.job, context.run_config.deadlines.start
    workers = [actor for peer, actor in context.actors.items() if peer.role == "worker"]
    servers = [actor for peer, actor in context.actors.items() if peer.role == "server"]
    in_driver = job.strategy.in_driver
    hosting = [] if in_driver else servers or workers
    others = [worker for worker in workers if worker not in hosting]
    opened = _open(context, hosting, others, initial)
    listening = opened[len(hosting) :] if others else opened
    if in_driver:
        return [], listening  # workers connect to the driver, once it listens
    ends = opened[: len(hosting)]
    exchanging = bool(job.places.aggregators) or job.servers_in_workers  # servers, chunks
    earlier = [ends[: i if exchanging else 1] for i in range(1, len(hosting))]
    calls = [
        runtime().call(actor, "connect", to, timeout)
        for actor, to in zip(hosting[1:], earlier, strict=True)
    ]
    context.get(calls, "connect the servers", context.names(hosting[1:]))
    connect_to(context, ends, others)
    return ends, listening


def connect_to(context: JobContext, ends: Sequence[Address], workers: Sequence[Any]) -> None:
    """Connect workers without servers to the processes that host servers."""
    timeout = context.run_config.deadlines.start
    connecting = [runtime().call(worker, "connect", ends, timeout) for worker in workers]
    context.get(connecting, "connect the workers", context.names(workers))


def _open(
    context: JobContext, hosting: list[Any], others: list[Any], initial: Any
) -> list[Address]:
    """Let processes open their roles; return where each listens. Processes of servers take turns."""
    job, count = context.stored_job, context.job.num_servers
    dealt = [list(range(count))] if len(hosting) == 1 else [[i] for i in range(count)]
    opened: list[Address] = context.get(
        [
            runtime().call(actor, "open", job, numbers, initial)
            for actor, numbers in zip(hosting, dealt, strict=bool(hosting))
        ],
        "open the servers",
        context.names(hosting),
    )
    members = {member.actor: member for member in context.members.values()}
    lives = [members[worker].life for worker in others]
    opening = [
        runtime().call(w, "open", job, [], initial, life)
        for w, life in zip(others, lives, strict=True)
    ]
    return opened + context.get(opening, "open the workers", context.names(others))


def holdings(job: Job, process_of: Callable[[Peer], Any]) -> Holdings:
    """Return the processes that hold each chunk in a job; `process_of` returns Ray's handle of a server's process."""
    processes = [process_of(server_peer(index)) for index in range(job.num_servers)]
    return {
        chunk: [processes[server] for server in servers]
        for chunk, servers in enumerate(job.holders)
    }


def carry(context: JobContext, before: Holdings, after: Holdings) -> None:
    """Give servers that were just made their chunks, see `RetainedChunks`.

    Ray carries all chunks that one process has for another as one object, which neither the
    driver nor a third process touches. Afterwards processes keep only what their servers hold.

    Raises:
        PeerLostError: nobody holds a chunk any more.
    """
    burden: Counter[Any] = Counter()  # chunks that a process gives away
    gifts: dict[tuple[Any, Any], list[int]] = {}
    for chunk, processes in after.items():
        for process in dict.fromkeys(processes):
            if process not in before[chunk]:
                if not before[chunk]:
                    raise PeerLostError(f"the last process that held chunk {chunk} died")
                giver = min(before[chunk], key=lambda each: burden[each])
                burden[giver] += 1
                gifts.setdefault((giver, process), []).append(chunk)
    gifts_of: dict[Any, list[Any]] = {
        process: [] for processes in after.values() for process in processes
    }
    for (giver, process), chunks in gifts.items():
        gifts_of[process].append(runtime().call(giver, "give", chunks))
    taking = [runtime().call(process, "take_over", *gifts) for process, gifts in gifts_of.items()]
    context.get(taking, "take over what others held", context.names(gifts_of))
