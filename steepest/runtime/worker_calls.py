"""Runs functions on a job's workers, and translates their errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from steepest.core.messages.message import Peer, worker_peer
from steepest.errors import ConfigurationError, PeerLostError, ShutdownError
from steepest.runtime.calls import (
    drop_calls,
    has_answered,
    raise_remote,
    raise_unsendable,
    travelling,
    who_raised,
)
from steepest.runtime.context import JobContext
from steepest.runtime.deaths import Deaths
from steepest.runtime.job_runtime import (
    CallRaisedError,
    ProcessDiedError,
    ResultLostError,
    runtime,
)
from steepest.runtime.remote_functions import PickledResult, name_of

_NOTICE_SECONDS = 5.0  # that Ray takes, at most, to see that a process is gone


class WorkerCalls:
    """Runs functions on the replicas of a job's workers."""

    def __init__(self, context: JobContext, deaths: Deaths) -> None:
        self._context = context
        self._deaths = deaths
        self._numbers = itertools.count(1)  # of calls, for the collective operations in them

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        workers: list[int] | None = None,  # that run it; all by default
        view: bool = False,  # give it a `WorkerView` instead of the replicas
        waits: bool = True,  # for the last committed weights
        what: str = "do its part",  # for errors
    ) -> list[Any]:
        """Return what a function returned on workers, run as soon as they hold the last committed weights.

        Raises:
            ModelRaisedError: the function raised; its traceback is the cause. Our own errors are
                raised as they are. The other workers' collective operations are ended.
            ConfigurationError: the function, an argument or a result cannot travel.
            PeerLostError: a process died.
            DeadlineError: a worker has not answered for `DeadlineConfig.call` seconds.
        """
        context, seconds = self._context, self._context.run_config.deadlines.call
        now = context.client.position
        position = (now.generation, now.version) if waits else (0, -1)
        stored = [travelling(f"what a worker needs to {what}", argument) for argument in arguments]
        chosen = list(range(context.job.num_workers)) if workers is None else workers
        actors = {index: context.members[worker_peer(index)].actor for index in chosen}
        number, method = next(self._numbers), "view_call" if view else "call"
        try:
            refs = {
                runtime().call(actor, method, position, number, function, *stored): index
                for index, actor in actors.items()
            }
        except Exception as error:  # noqa: BLE001 - the user's objects are pickled by methods of their own
            raise_unsendable(f"the function {name_of(function)}", function, error)
        results: dict[int, Any] = {}

        def late(calls: Collection[Any]) -> tuple[str, str]:
            silent = ", ".join(str(worker_peer(refs[ref])) for ref in calls)
            error = f"{silent} did not answer within {seconds:g} s at version {position[1]}"
            return f"{silent} asked to {what}", error

        try:
            for ref in context.ended([*refs], seconds, late, self._deaths.raise_if_dead):
                # raises what it raised, without waiting long for the others
                results[refs[ref]] = self._result(ref, refs, what)
                del refs[ref]
        finally:
            drop_calls(refs)
            for index in refs.values():
                runtime().call(
                    actors[index], "abandon", number, "another worker failed, or the driver gave up"
                )
        return [results[index] for index in chosen]

    def _result(self, ref: Any, calls: Mapping[Any, int], what: str) -> Any:
        """Return the result of a worker's call; that of a user's function is unpickled."""
        name = self._name(calls[ref])
        try:
            result = ref.get()
        except CallRaisedError as error:
            names = who_raised(error, {each: self._name(worker) for each, worker in calls.items()})
            try:
                raise_remote(error, names, what)
            except (PeerLostError, ShutdownError):
                self._deaths.raise_if_dead(wait=_NOTICE_SECONDS)  # the better explanation
                raise
        except (ProcessDiedError, ResultLostError) as error:
            self._deaths.raise_if_dead(wait=_NOTICE_SECONDS)
            raise PeerLostError(f"{name} died before it could {what}") from error
        if not isinstance(result, PickledResult):
            return result
        try:
            return result.value()
        except (Exception, SystemExit) as error:
            raise ConfigurationError(
                f"the driver cannot read what {name} returned when asked to {what}: "
                f"{type(error).__name__}: {error}: return what can be pickled, of modules that the driver has too"
            ) from error

    def _name(self, worker: int) -> str:
        peer = worker_peer(worker)
        return f"{peer} on {self._context.members[peer].place.host}"

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on all workers between two of their steps, while they train or not.

        Returns:
            What it returned, without workers that are dead or silent for `DeadlineConfig.call` seconds.
        """
        context = self._context
        workers = [actor for peer, actor in sorted(context.actors.items()) if peer.role == "worker"]
        refs = [
            runtime().call(actor, "call", (0, -1), 0, function, *arguments) for actor in workers
        ]
        context.owner.attend(context.run_config.deadlines.call, calls=refs)
        return [ref.get() for ref in refs if has_answered(ref)]

    def answers(self, method: str, seconds: float = _NOTICE_SECONDS) -> dict[Peer, Any]:
        """Return the results of a method of each process that answers within some seconds."""
        actors = self._context.actors
        refs = {peer: runtime().call(actor, method) for peer, actor in actors.items()}
        self._context.owner.attend(seconds, calls=[*refs.values()])
        return {peer: ref.get() for peer, ref in refs.items() if has_answered(ref)}
