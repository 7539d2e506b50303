"""The thread that replaces dead servers, in the process that made a parameter server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steepest.parameter_server.servers import Servers, call_all
from steepest.parameter_server.succession import Succession
from steepest.runtime.job_runtime import (
    Call,
    CallError,
    CallRaisedError,
    ProcessDiedError,
    runtime,
)

if TYPE_CHECKING:
    from steepest.core.optim.spec import OptimizerSpec
    from steepest.parameter_server.access import Access

log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.3  # between two looks at the servers
_CALL_SECONDS = 60.0  # that a call may take while servers are replaced, and Ray starts processes
_REPLACE_SECONDS = 300.0  # after which no further attempt to replace servers is begun


class ServerKeeper:
    """Replaces the servers that die, as long as `access` returns them.

    A dead server's process is started again. All servers then stop, the survivors agree on the last
    version that one of them knows, and the new process gets copies of its chunks. Users find the new
    addresses by a `Search`.

    Args:
        access: returns how to reach the servers; None when they are no longer to be replaced.
            The result is not kept: actors end with their last handle.
        spec: the servers' optimizer.
    """

    def __init__(self, access: Callable[[], Access | None], spec: OptimizerSpec | None) -> None:
        self._access = access
        self._spec = spec
        self._number = 0
        threading.Thread(target=self._run, name="steepest keeper", daemon=True).start()

    def _run(self) -> None:
        """Look at the servers until they need not be replaced any more."""
        while (access := self._access()) is not None and runtime().is_up:
            try:
                if not self._all_serve(access.servers):
                    self._replace(access)
            except CallError:
                if self._access() is not None:
                    log.exception("the servers of a parameter server cannot be replaced")
                return
            del access
            time.sleep(_LOOK_SECONDS)

    def _all_serve(self, servers: Servers) -> bool:
        """Return whether no server has died, or lost another one, since the last succession."""
        waiting = {call: index for index, call in enumerate(call_all(servers, "serves"))}
        deadline = time.monotonic() + _CALL_SECONDS
        while waiting:
            left = max(deadline - time.monotonic(), 0.0)
            ready = runtime().wait(list(waiting), left, 1)
            if not ready:
                return True  # the others are stopped, or busy
            index = waiting.pop(ready[0])
            try:
                if not ready[0].get():
                    return False
            except ProcessDiedError:
                return False
            except CallRaisedError:  # its router has ended by an error, which it logs
                servers.end_one(index)
                return False
        return True

    def _replace(self, access: Access) -> None:
        """Let all servers go on, successors of dead ones from copies of their chunks."""
        began = time.monotonic()
        while True:
            try:
                succession, names = self._succession(access)
                places = _get(call_all(access.servers, "place"))
                _get(call_all(access.servers, "succeed", succession))
                access.servers.announce(places, succession)
                break
            except CallError as error:  # another server has died, or is yet to start
                if self._access() is None or time.monotonic() > began + _REPLACE_SECONDS:
                    raise
                log.info("servers are not replaced yet: %s", " ".join(str(error).split()))
                time.sleep(_LOOK_SECONDS)
        if succession.failure:
            log.error("a parameter server ends: %s", succession.failure)
        else:
            log.warning(
                "%s of a parameter server died and was replaced within %.1f s; no update is lost",
                names or "a channel between servers", time.monotonic() - began,
            )  # fmt: skip

    def _succession(self, access: Access) -> tuple[Succession, str]:
        """Stop all servers, reopen them at their last common version; return the succession, and the dead in words."""
        self._number += 1
        access.servers.revive()
        servers, group, call = access.servers.handles, access.group, runtime().call
        heard = _get(call_all(access.servers, "halt"))
        alive = [index for index, decisions in enumerate(heard) if decisions is not None]
        lost = ", ".join(f"server {i}" for i in range(len(servers)) if i not in alive)
        known = runtime().put([heard[index] for index in alive])
        survivors = _get([call(servers[index], "survive", known) for index in alive])
        from steepest.runtime.survivors import assemble  # imports torch

        states = {index: state for index, (state, _) in zip(alive, survivors, strict=True)}
        whole = assemble(len(group.holders), states) if states else None
        if whole is None or whole.holders is None:
            failure = f"{lost} died together, and no copy is left of some chunks"
            return Succession(self._number, failure=failure), lost
        addresses = _get(
            [
                call(server, "reopen", group, self._spec, index, whole.version, access.ways)
                for index, server in enumerate(servers)
            ]
        )
        moves = []
        for index, server in enumerate(servers):
            gifts = []
            if index not in alive or not states[index].chunks:  # its optimizer raised
                mine = [c for c, holders in enumerate(group.holders) if index in holders]
                sources = [whole.holders[chunk][0] for chunk in mine]
                gifts = [
                    call(
                        servers[source],
                        "give",
                        [c for c, s in zip(mine, sources, strict=True) if s == source],
                    )
                    for source in sorted(set(sources))
                ]
            moves.append(call(server, "take_over", *gifts))
        _get(moves)
        _get([call(server, "connect", addresses[:1], _CALL_SECONDS) for server in servers[1:]])
        committed = {push: version for _, own in survivors for push, version in own.items()}
        return Succession(self._number, tuple(addresses), committed), lost


def _get(calls: list[Call]) -> list[Any]:
    """Return the results of calls; CallError: one failed, or has not returned within a minute."""
    return runtime().get(calls, _CALL_SECONDS)
