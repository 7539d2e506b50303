"""Chunks that change hands when processes get other roles; all others stay where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steepest.engine.job import Job
from steepest.errors import PeerLostError
from steepest.messages.message import Peer, server_peer

#: The processes that have each chunk.
Holdings = Mapping[int, Sequence[Any]]


def holdings(job: Job, process_of: Callable[[Peer], Any]) -> Holdings:
    """Return the processes that hold each chunk in a job; `process_of` returns Ray's handle of a server's process."""
    processes = [process_of(server_peer(index)) for index in range(job.num_servers)]
    return {
        chunk: [processes[server] for server in servers]
        for chunk, servers in enumerate(job.holders)
    }


def carry(
    before: Holdings,
    after: Holdings,
    get: Callable[..., list[Any]],  # as `Cluster._results_of`
) -> None:
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
    given: dict[Any, list[Any]] = {
        process: [] for processes in after.values() for process in processes
    }
    for (giver, process), chunks in gifts.items():
        given[process].append(giver.give.remote(chunks))
    taking = [process.take_over.remote(*gifts) for process, gifts in given.items()]
    get(taking, "take over what others held", of=given)
