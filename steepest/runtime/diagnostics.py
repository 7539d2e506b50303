"""Why a step failed or a process died, in words for the user, with its last lines of output."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    ModelError,
    ModelRaisedError,
    NonFiniteError,
    PeerLostError,
    RemoteTraceback,
    described_error,
)
from steepest.messages.driver import Failure
from steepest.messages.message import Peer, worker_peer
from steepest.runtime.remote_error import RemoteError
from steepest.runtime.unpicklable import why_unpicklable

if TYPE_CHECKING:
    from steepest.runtime.locations import Place

_LINES = 12
_NAMED = 4  # processes that raised the same
_ALIKE_SECONDS = 0.3  # in which the others, which began at the same time, come as far


def raise_step_error(
    failure: Failure,
    places: Mapping[Peer, Place],
    late: Sequence[tuple[str, str, str]] = (),  # name, samples in words, frames of users' code
) -> NoReturn:
    """Raise the error that a failed step stands for.

    Raises:
        ModelError: the model was used in a way that steepest refuses.
        ModelRaisedError: the user's model, data or schedule raised; its traceback is the cause.
        NonFiniteError: a gradient holds NaN or infinity.
        DeadlineError: processes did not do their part in time; users' code in which they are is
            the cause.
    """
    step = failure.step + 1
    if failure.reason == "raised":
        _raise_of_worker(failure, places)
    if failure.reason == "schedule":
        raise ModelRaisedError(
            f"the learning-rate schedule raised in step {step}: {failure.error}; nothing of the "
            "step was applied: it must give every step's hyperparameters"
        ) from RemoteTraceback(failure.traceback)
    if failure.reason == "nonfinite":
        found = ", ".join(
            f"{name!r} of worker {worker}"
            if worker >= 0
            else f"{name!r} (the sum over workers overflows)"
            for worker, name in failure.culprits[:5]
        )
        raise NonFiniteError(
            f"step {step}: the gradient of {found} holds NaN or infinity; nothing of the step was "
            "applied: lower the learning rate, or look at the data and the loss"
        )
    frames = "\n".join(f"{name} is in:\n{where}" for name, _, where in late if where)
    raise DeadlineError(
        f"step {step} was not committed within {failure.seconds:g} s: still waiting for "
        f"{', '.join(failure.awaited)}; nothing of it was applied"
        + "".join(f"; {name} computes {samples}" for name, samples, _ in late if samples)
    ) from (RemoteTraceback(frames) if frames else None)


def update_error(
    failure: Failure,
    places: Mapping[Peer, Place],
    now: int | None,  # steps committed in the state with which the job continues, if it can
) -> ModelRaisedError:
    """Return the error for a server's optimizer that raised in the middle of an update."""
    step, where = failure.step + 1, ""
    assert failure.peer is not None
    if (
        place := places.get(failure.peer) or places.get(worker_peer(failure.peer.index))
    ) is not None:
        where = f" on {place.host}"
    then = (
        f"the job is set back: weights and optimizer state are those after step {now}; mend it and "
        "step again"
    )
    if now is None:
        then = (
            "there is no snapshot to go back to, so this trainer can only be shut down: restore a "
            "checkpoint with a new one, and leave FailureConfig(snapshot_every=) as it is"
        )
    error = ModelRaisedError(
        f"{failure.peer}{where}: the optimizer raised in step {step}: {failure.error}; parts of the "
        f"model had the update by then and others not, so {then}"
    )
    error.__cause__ = RemoteTraceback(failure.traceback)
    return error


def _raise_of_worker(failure: Failure, places: Mapping[Peer, Place]) -> NoReturn:
    assert failure.worker is not None
    step, place = failure.step + 1, places.get(worker_peer(failure.worker))
    who = f"worker {failure.worker}{f' on {place.host}' if place else ''}"
    described = {"kind": failure.kind, "error": failure.error, "traceback": failure.traceback}
    own = described_error(described, f"{who}, step {step}: ")
    if isinstance(own, ModelError):
        raise own
    raise ModelRaisedError(
        f"{who}: the model or its data raised in step {step}: {failure.error}; nothing of the "
        "step was applied: mend them and step again"
    ) from RemoteTraceback(failure.traceback)


def last_lines(paths: tuple[str, ...], count: int = _LINES) -> list[str]:
    """Return the last lines of log files, without Ray's own marks; a missing file has none."""
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            kept = deque((line.rstrip() for line in file if not line.startswith(":")), maxlen=count)
            lines += [line for line in kept if line]
    return lines[-count:]


def fetch_last_lines(place: Place, timeout: float = 5.0) -> list[str]:
    """Return the last lines of output of a process, read on its own node, or why they cannot be read."""
    if ray.get_runtime_context().get_node_id() == place.node:
        return last_lines(place.logs)
    affinity = NodeAffinitySchedulingStrategy(node_id=place.node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(last_lines).options(scheduling_strategy=affinity)
    try:
        lines: list[str] = ray.get(task.remote(place.logs), timeout=timeout)
    except ray.exceptions.RayError as error:
        return [f"(its log cannot be read: {str(error).splitlines()[0]})"]
    return lines


def raise_lost(peer: Peer, place: Place | None, why: str, traceback: str = "") -> NoReturn:
    """Raise PeerLostError for a process, with its place and its last lines of output."""
    where, lines = "", ["(nothing)"]
    if place is not None:
        where = f" on {place.host} (node {place.node[:12]}, pid {place.pid})"
        lines = fetch_last_lines(place) or lines
    text = "\n".join(f"    {line}" for line in lines)
    raise PeerLostError(
        f"{peer}{where} died: {why}; the weights of the last commit are still there unless it held "
        f"them (weights(), save()); its last lines:\n{text}"
    ) from (RemoteTraceback(traceback) if traceback else None)


def has_answered(call: Any) -> bool:
    """Return whether a call of an actor has returned; False if it raised or has not ended."""
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except ray.exceptions.RayError:
        return False
    return True


def never_ran(call: Any) -> bool:
    """Return whether a call failed because Ray could not start the actor's process."""
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.RayError:
        return False
    return False


def who_raised(error: ray.exceptions.RayTaskError, calls: Mapping[Any, str]) -> str:
    """Return the names of the processes that raised the same error, such as "worker 0, worker 2"."""
    if calls:
        ray.wait(list(calls), num_returns=len(calls), timeout=_ALIKE_SECONDS)
    words = _words_of(error)
    found = [name for call, name in calls.items() if _words_of(_error_of(call)) == words]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more or "a process"


def _error_of(call: Any) -> ray.exceptions.RayTaskError | None:
    """Return what a call of an actor has raised; None if it has not."""
    if not ray.wait([call], timeout=0)[0]:
        return None
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return error
    except ray.exceptions.RayError:
        return None
    return None


def _words_of(error: ray.exceptions.RayTaskError | None) -> str:
    """Return the class and message of what a call raised; "" for None."""
    if error is None:
        return ""
    return error.cause.told["error"] if isinstance(error.cause, RemoteError) else last_line(error)


def drop_calls(calls: Iterable[Any]) -> None:
    """Let nobody wait for calls any more: Ray logs an error that nobody has asked for."""
    for call in calls:
        call.future()


def raise_remote(error: ray.exceptions.RayTaskError, who: str, what: str) -> NoReturn:
    """Raise for the user what a remote call raised, without Ray's traceback.

    Raises:
        SteepestError: an error of ours, of its own class, with the processes' names.
        ModelRaisedError: the user's code raised; its own frames are the cause.
        ConfigurationError: an argument could not be unpickled, or a result not pickled; or only
            the driver can import a module.
        PeerLostError: the process that was to send an argument died.
    """
    cause = error.cause
    if isinstance(cause, ray.exceptions.RayActorError):
        raise PeerLostError(
            f"{who} was not sent what it needs to {what}, because a process died: {last_line(error)}"
        ) from None
    if isinstance(cause, RemoteError):
        _raise_described(cause.told, who, what)
    if isinstance(cause, ray.exceptions.RaySystemError):
        words = last_line(error)
        raise ConfigurationError(
            unimportable(words)
            or f"{who} cannot read what it was sent to {what}: {words}: send what can be pickled, "
            "of modules that the workers have too"
        ) from None
    raise ConfigurationError(
        f"{who} could not send what came of it when asked to {what}: {type(cause).__name__}: "
        f"{cause}; return what can "
        "be pickled: numbers, text, tensors, arrays, and containers of these"
    ) from None


def unimportable(words: str) -> str:
    """Return what to do when workers lack a module that the driver has; "" for another error, or no such module."""
    found = re.search(r"^ModuleNotFoundError: No module named '((\w+)[\w.]*)'$", words)
    if found is None:
        return ""
    name, package = found.groups()
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else [*(spec.submodule_search_locations or ())]
    if spec is not None and spec.origin is not None and spec.has_location and not places:
        places = [spec.origin]
    if not places:
        return ""
    folder = Path(places[0]).resolve().parent
    return (
        f"workers cannot import {name!r}, which the driver finds in {folder}: put that folder on "
        f'PYTHONPATH before Ray starts, or give ray.init(runtime_env={{"working_dir": "{folder}"}})'
    )


def _raise_described(described: Mapping[str, str], who: str, what: str) -> NoReturn:
    """Raise an error that travelled as text (`describe_error`), see `raise_remote`."""
    if (own := described_error(described, f"{who}: ")) is not None:
        raise own
    hint = unimportable(described["error"])
    raise ModelRaisedError(
        f"{who} could not {what}: {described['error']}{hint and f'; {hint}'}"
    ) from RemoteTraceback(described["traceback"])


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's message."""
    return str(error).rstrip().splitlines()[-1]


def travelling(what: str, value: Any) -> Any:
    """Put an object of the user's into Ray's store; return its reference.

    Raises:
        ConfigurationError: it cannot be pickled.
    """
    try:
        return ray.put(value)
    except ray.exceptions.RayError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's objects are pickled by methods of their own
        raise_unsendable(what, value, error)


def raise_unsendable(what: str, value: Any, error: Exception) -> NoReturn:
    """Raise ConfigurationError for an object of the user's that cannot be pickled."""
    why = why_unpicklable(value, error)
    raise ConfigurationError(f"{what} cannot be sent to the workers: {why}") from None
