"""Calls of a job's processes: functions run on its workers, and what becomes of errors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from steepest.cluster.diagnostics import (
    has_answered,
    has_raised,
    last_line,
    raise_remote,
    raise_unsendable,
    travelling,
)
from steepest.cluster.remote_functions import name_of
from steepest.errors import ConfigurationError, DeadlineError, PeerLostError, ShutdownError
from steepest.messages.message import Peer, worker_peer

if TYPE_CHECKING:
    from steepest.cluster.launch import Cluster

_LOOK_SECONDS = 1.0
_NOTICE_SECONDS = 5.0  # that Ray takes, at most, to see that a process is gone


class WorkerCalls:
    """Runs functions on the replicas of a job's workers.

    Args:
        cluster: the job's processes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count(1)  # of calls, for the collective operations in them

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        workers: list[int] | None = None,
        view: bool = False,
        what: str = "do its part",
    ) -> list[Any]:
        """Run a function on workers as soon as they hold the last committed weights.

        Workers that are dead by then are replaced before.

        Args:
            function: called with a worker's `Replicas`, then the arguments.
            arguments: the same for all workers; each is put into Ray's store once.
            workers: indices of the workers that run it; all by default.
            view: give the function a `WorkerView` instead of the replicas.
            what: a worker is asked to do, for errors.

        Returns:
            What the function returned on each worker, in the order of `workers`.

        Raises:
            ModelRaisedError: the function raised; its traceback is the cause. Our own errors are
                raised as they are. The other workers' collective operations are ended.
            ConfigurationError: the function, an argument or a result cannot travel.
            PeerLostError: a process died.
            DeadlineError: a worker has not answered for `DeadlineConfig.call` seconds.
        """
        cluster, seconds = self._cluster, self._cluster.run_config.deadlines.call
        cluster.mend()
        position = (cluster.client.position.generation, cluster.client.position.version)
        stored = [travelling(f"what a worker needs to {what}", argument) for argument in arguments]
        chosen = list(range(cluster.job.num_workers)) if workers is None else workers
        actors = {index: cluster.actors[worker_peer(index)] for index in chosen}
        number = next(self._numbers)
        try:
            refs = {
                (actor.view_call if view else actor.call).remote(
                    position, number, function, *stored
                ): index
                for index, actor in actors.items()
            }
        except Exception as error:  # noqa: BLE001 - the user's objects are pickled by methods of their own
            raise_unsendable(f"the function {name_of(function)}", error)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        try:
            while refs:
                done, _ = ray.wait(list(refs), timeout=min(_LOOK_SECONDS, seconds))
                for ref in done:  # raises what it raised, without waiting for the others
                    results[refs[ref]] = self._result(ref, refs[ref], what)
                    del refs[ref]
                if not done:
                    cluster.raise_if_dead()
                    if time.monotonic() > deadline:
                        silent = ", ".join(str(worker_peer(index)) for index in refs.values())
                        raise DeadlineError(
                            f"{silent} did not answer within {seconds:g} s at version {position[1]}"
                        )
        finally:
            for index in refs.values():
                actors[index].abandon.remote(number, "another worker failed, or the driver gave up")
        return [results[index] for index in chosen]

    def _result(self, ref: Any, worker: int, what: str) -> Any:
        """Return what a call of a worker returned, or put into Ray's store."""
        cluster, peer = self._cluster, worker_peer(worker)
        name = f"{peer} on {cluster.places[peer].host}"
        try:
            result = ray.get(ref)
            if isinstance(result, ray.ObjectRef):
                (result,) = ray.get(result)
            return result
        except ray.exceptions.RayTaskError as error:
            try:
                raise_remote(error, name, what)
            except (PeerLostError, ShutdownError):
                cluster.raise_if_dead(wait=_NOTICE_SECONDS)  # the better explanation
                raise
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
            cluster.raise_if_dead(wait=_NOTICE_SECONDS)
            raise
        except (ray.exceptions.RaySystemError, SystemExit) as error:
            raise ConfigurationError(
                f"the driver cannot read what {name} returned when asked to {what}: "
                f"{last_line(error)}: return what can be pickled, of modules that the driver has "
                "too"
            ) from error

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on all workers between two of their steps, while they train or not.

        May be called on any thread.

        Returns:
            What the function returned, in the order of workers, without the workers that are dead
            or have not answered within `DeadlineConfig.call` seconds.
        """
        cluster = self._cluster
        workers = [actor for peer, actor in sorted(cluster.actors.items()) if peer.role == "worker"]
        refs = [actor.call.remote((0, -1), 0, function, *arguments) for actor in workers]
        ray.wait(refs, num_returns=len(refs), timeout=cluster.run_config.deadlines.call)
        return [ray.get(ref) for ref in refs if has_answered(ref)]

    def counters(self) -> dict[Peer, dict[str, int]]:
        """Return the counters of all processes that answer in time, see `Process.counters`."""
        actors = self._cluster.actors
        refs = {peer: actor.counters.remote() for peer, actor in actors.items()}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=_NOTICE_SECONDS)
        return {peer: ray.get(ref) for peer, ref in refs.items() if has_answered(ref)}


def results_of(
    refs: list[Any], what: str, peers: Sequence[Peer], deadline: float, limit: float
) -> list[Any]:
    """Return what calls of a job's processes return, while it starts or is put together anew.

    Args:
        refs: the calls.
        what: the processes are asked to do, for errors.
        peers: that are called, in the order of `refs`; may be empty.
        deadline: until when to wait, of `time.monotonic`.
        limit: the seconds that the deadline allowed, for errors.

    Raises:
        ModelRaisedError: the user's code raised; its traceback is the cause. Our own errors are
            raised as they are.
        PeerLostError: a process died.
        DeadlineError: not all calls ended before the deadline.
    """
    try:
        results: list[Any] = ray.get(refs, timeout=max(deadline - time.monotonic(), 0.1))
    except ray.exceptions.GetTimeoutError:
        _, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
        late = [str(peers[refs.index(ref)]) for ref in waiting] if peers else [str(len(waiting))]
        raise DeadlineError(
            f"{', '.join(late)} of {len(refs)} processes did not {what} within {limit:g} s: raise "
            "DeadlineConfig(start=...)"
        ) from None
    except ray.exceptions.RayTaskError as error:
        raised = (str(peer) for ref, peer in zip(refs, peers, strict=False) if has_raised(ref))
        name = next(raised, "a process")
        try:
            raise_remote(error, name, what)
        except ShutdownError as ended:  # its router, not this trainer
            raise PeerLostError(f"{name} ended before it could {what}") from ended
    except ray.exceptions.RayActorError as error:
        raise PeerLostError(
            f"a process died before it could {what}: {' '.join(str(error).split())}"
        ) from error
    return results
