"""Why a step failed or a process died, in words for the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from steepest.errors import (
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
from steepest.runtime.places import Place, fetch_last_lines


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
