"""Why a step failed or a process died: our words for it, what Ray says, and the last lines that it wrote."""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Mapping
from typing import Any, NoReturn

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from steepest.comm.message import Peer
from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    ModelRaisedError,
    NonFiniteError,
    PeerLostError,
    RemoteTraceback,
    SteepestError,
)
from steepest.job import ModelCreator
from steepest.runtime.process import Place

_LINES = 12


def raise_step_error(meta: dict[str, Any], places: Mapping[Peer, Place]) -> NoReturn:
    """Raises the error that the coordinator's words about a step stand for."""
    step = meta["step"] + 1
    if meta["reason"] == "raised":
        place = places.get(Peer("worker", meta["worker"]))
        where = f" on {place.host}" if place else ""
        raise ModelRaisedError(
            f"worker {meta['worker']}{where}: the model raised in step {step}: {meta['error']}; nothing of the step "
            "was applied: mend the model or its data and step again"
        ) from RemoteTraceback(meta["traceback"])
    if meta["reason"] == "schedule":
        raise ModelRaisedError(
            f"the learning-rate schedule raised in step {step}: {meta['error']}; nothing of the step was applied: "
            "it must give every step's hyperparameters"
        ) from RemoteTraceback(meta["traceback"])
    if meta["reason"] == "nonfinite":
        found = ", ".join(
            f"{name!r} of worker {worker}" if worker >= 0 else f"{name!r} (the sum over workers overflows)"
            for worker, name in meta["culprits"][:5]
        )
        raise NonFiniteError(
            f"step {step}: the gradient of {found} holds NaN or infinity; nothing of the step was applied: lower the "
            "learning rate, or look at the data and the loss"
        )
    raise DeadlineError(
        f"step {step} was not committed within {meta['seconds']:g} s: still waiting for "
        f"{', '.join(meta['awaited'])}; nothing of it was applied"
    )


def last_lines(paths: tuple[str, ...], count: int = _LINES) -> list[str]:
    """The last lines of log files, without Ray's own marks."""
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            kept = deque((line.rstrip() for line in file if not line.startswith(":")), maxlen=count)
            lines += [line for line in kept if line]
    return lines[-count:]


def fetch_last_lines(place: Place, timeout: float = 5.0) -> list[str]:
    """`last_lines` of a process, read on its own node."""
    if ray.get_runtime_context().get_node_id() == place.node:
        return last_lines(place.logs)
    affinity = NodeAffinitySchedulingStrategy(node_id=place.node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(last_lines).options(scheduling_strategy=affinity)
    try:
        lines: list[str] = ray.get(task.remote(place.logs), timeout=timeout)
    except ray.exceptions.RayError as error:
        return [f"(its log cannot be read: {str(error).splitlines()[0]})"]
    return lines


def cause_of_death(watch: Any) -> str | None:
    """What Ray knows about an actor's end; None while it lives."""
    ready, _ = ray.wait([watch], timeout=0)
    if not ready:
        return None
    try:
        ray.get(watch)
    except ray.exceptions.RayActorError as error:
        text = " ".join(str(error).split())
        if "connection error code 2" in text:
            return "its process is gone: killed by a signal, or for want of memory"
        for mark in ("The actor is dead because", "Worker exits", "Worker unexpectedly exits"):
            if mark in text:
                return text[text.index(mark) :].partition(" Some common causes")[0][:300]
        return text[:300]
    except ray.exceptions.RayTaskError as error:
        return f"its router ended: {error.cause!r}"
    return "it was stopped"


def raise_lost(peer: Peer, place: Place | None, why: str) -> NoReturn:
    """Raises PeerLostError for a process, with where it was and its last lines."""
    where, lines = "", ["(nothing)"]
    if place is not None:
        where = f" on {place.host} (node {place.node[:12]}, pid {place.pid})"
        lines = fetch_last_lines(place) or lines
    text = "\n".join(f"    {line}" for line in lines)
    raise PeerLostError(
        f"{peer}{where} died: {why}; the weights of the last commit are still there unless it held them "
        f"(weights(), save()); its last lines:\n{text}"
    )


def has_answered(call: Any) -> bool:
    """Whether a call of an actor has returned; not if it raised, or has not ended."""
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except ray.exceptions.RayError:
        return False
    return True


def never_ran(call: Any) -> bool:
    """Whether a call failed because the actor's process could not start where Ray wanted it."""
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.RayError:
        return False
    return False


def raise_remote(error: ray.exceptions.RayTaskError, what: str) -> NoReturn:
    """Raises what a remote call raised: our own errors as they are, the user's as ModelRaisedError."""
    cause = error.cause
    trace = RemoteTraceback(str(error))
    if isinstance(cause, SteepestError):
        raise cause from trace
    raise ModelRaisedError(f"{what}: {type(cause).__name__}: {cause}") from trace


def travelling(model_creator: ModelCreator) -> Any:
    """The user's function in Ray's store."""
    try:
        return ray.put(model_creator)
    except (TypeError, pickle.PicklingError) as error:
        raise ConfigurationError(
            f"model_creator cannot be sent to the workers: {error.__cause__ or error}; make that inside it"
        ) from None
