"""Successors that join a job while the others stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from steepest.core.messages.message import Peer, worker_peer
from steepest.errors import PeerLostError
from steepest.runtime.recovery.joining import Joining

DEAD = {worker_peer(0): "killed", worker_peer(1): "killed"}


def joining(seen: dict[Peer, str]) -> Joining:
    """One of a job in which workers 0 and 1 have died, where a look sees these as dead while worker 1 joins."""
    start = SimpleNamespace(
        place=SimpleNamespace(node="a"), actor=None, watch=None, is_dead=False, building=[]
    )
    starting = SimpleNamespace(
        instead=dict.fromkeys(DEAD, start), joined=lambda actors: None, give_up=lambda starts: None
    )
    observation = SimpleNamespace(
        starting=starting,
        dead=lambda: seen,
        ask_for_signs=lambda: None,
        fill_reserve=lambda: None,
    )
    place = SimpleNamespace(node="a")
    waits = iter(range(3))  # a look that finds nothing new would wait until its time is over

    def wait(*_: Any, **__: Any) -> None:
        next(waits)

    cluster = SimpleNamespace(
        places=dict.fromkeys(DEAD, place),
        members=dict.fromkeys(DEAD, SimpleNamespace(place=place)),
        watches={},
        step=7,
        run_config=SimpleNamespace(failure=SimpleNamespace(heartbeat=1.0)),
        owner=SimpleNamespace(attend=wait),
        await_successors=lambda missing: None,
    )
    return Joining(cluster, observation)  # type: ignore[arg-type]


@pytest.mark.parametrize("again", [worker_peer(0), worker_peer(2)])
def test_a_worker_that_dies_while_another_joins_is_no_error(
    again: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has joined a moment before, in the place of one that was known to be dead."""

    def join(self: Joining, peer: Peer, start: Any, missing: Any) -> None:
        if peer == worker_peer(1):
            raise PeerLostError(f"{again} died before it could do its part")

    monkeypatch.setattr(Joining, "_join", join)
    monkeypatch.setattr(Joining, "_tell_of", lambda *_: None)
    transition = SimpleNamespace(replaced=set(DEAD), missing=False)
    looks = {worker_peer(1): "killed", again: "killed"}
    assert joining(looks).join(transition, DEAD) == 1  # type: ignore[arg-type]
