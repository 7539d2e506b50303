"""A call of all processes of a job, from any thread, during training and during deaths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steepest.core.messages.message import Peer
from steepest.runtime.calls import drop_calls
from steepest.runtime.job_runtime import CallError, ProcessDiedError, runtime

_ANSWER_SECONDS = 2.0


def ask_all(
    actors: Mapping[Peer, Any],
    method: str,
    arguments: Callable[[Peer], Sequence[Any]] = lambda peer: (),
) -> dict[Peer, Any]:
    """Call a method of each process; return the results of those that live and answer within 2 seconds."""
    if not actors or not runtime().is_up:  # a call would start Ray again
        return {}
    calls = {
        peer: runtime().call(actor, method, *arguments(peer)) for peer, actor in actors.items()
    }
    done = runtime().wait(calls.values(), _ANSWER_SECONDS)
    answers = {}
    for peer, call in calls.items():
        if call in done:
            try:
                answers[peer] = call.get(_ANSWER_SECONDS / 2)
            except (ProcessDiedError, CallError):
                continue
    drop_calls(call for call in calls.values() if call not in done)
    return answers
