"""Why a step failed, in words for the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from steepest.core.messages.driver import Failure
from steepest.core.messages.message import Peer, worker_peer
from steepest.errors import (
    DataPlaneError,
    DeadlineError,
    ModelError,
    NonFiniteError,
    RemoteTraceback,
    described_by,
    described_error,
    listed,
    raised_by_user,
)

_NAMED = 4  # workers that raised the same


def raise_step_error(
    failure: Failure,
    hosts: Mapping[Peer, str],  # where processes run, as far as that is known
    late: Sequence[tuple[str, str, str]] = (),  # name, samples in words, frames of users' code
    held_up: str = "",  # what holds up servers, in words
    alike: Collection[int] = (),  # further workers that raised the same
) -> NoReturn:
    """Raise the error that a failed step stands for.

    Raises:
        ModelError: the model was used in a way that steepest refuses, or workers' own loops differ.
        ModelRaisedError: the user's model, data or schedule raised; its traceback is the cause.
        DataPlaneError: living workers could not add up their gradients among themselves.
        NonFiniteError: a gradient holds NaN or infinity.
        DeadlineError: processes did not do their part in time; its cause shows the user's code that they run.
    """
    step = failure.step + 1
    if failure.reason == "raised":
        assert failure.worker is not None
        workers = [worker_peer(index) for index in sorted({failure.worker, *alike})]
        who = listed(
            [f"{peer} on {hosts[peer]}" if peer in hosts else str(peer) for peer in workers]
        )
        described = described_by(failure)
        own = described_error(described, f"{who}, step {step}: ")
        if isinstance(own, (ModelError, DataPlaneError)):
            raise own
        raise raised_by_user(
            f"{who} raised in step {step}: {failure.error}; nothing of the step was applied",
            described,
        )
    if failure.reason == "schedule":
        raise raised_by_user(
            f"the learning-rate schedule raised in step {step}: {failure.error}; nothing of the "
            "step was applied: it must give every step's hyperparameters",
            described_by(failure),
        )
    if failure.reason == "unlike":
        raise ModelError(f"step {step}: {failure.why}; nothing of the step was applied")
    if failure.reason == "nonfinite":
        named = ", ".join(
            f"{name!r} of worker {worker}"
            if worker >= 0
            else f"{name!r} (the sum over workers overflows)"
            for worker, name in failure.culprits[:5]
        )
        raise NonFiniteError(
            f"step {step}: the gradient of {named} holds NaN or infinity; nothing of the step was "
            "applied: lower the learning rate, or look at the data and the loss"
        )
    frames = "\n".join(f"{name} is in:\n{where}" for name, _, where in late if where)
    raise DeadlineError(
        f"step {step} was not committed within {failure.seconds:g} s: still waiting for "
        f"{', '.join(failure.awaited)}; nothing of it was applied"
        + "".join(f"; {name} computes {samples}" for name, samples, _ in late if samples)
        + held_up
    ) from (RemoteTraceback(frames) if frames else None)
