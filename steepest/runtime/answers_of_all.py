"""What all processes of a job answer, asked on any thread, amid training and amid deaths."""

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
    """Return what a method of each process returned, without those that are dead or do not answer in 2 seconds."""
    if not actors or not runtime().is_up:  # else a call would begin Ray anew
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
