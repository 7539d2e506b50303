"""Why a server's update failed, in words for the user."""

from __future__ import annotations

from collections.abc import Mapping

from steepest.core.messages.driver import Failure
from steepest.core.messages.message import Peer, worker_peer
from steepest.errors import ModelRaisedError, described_by, raised_by_user
from steepest.runtime.places import Place


def update_error(
    failure: Failure,
    places: Mapping[Peer, Place],
    now: int | None,  # steps committed in the state with which the job continues, if it can
) -> ModelRaisedError:
    """Return the error for a server's optimizer that raised in the middle of an update."""
    assert failure.peer is not None
    place = places.get(failure.peer) or places.get(worker_peer(failure.peer.index))
    then = (
        "there is no snapshot to go back to, so this trainer can only be shut down: restore a "
        "checkpoint with a new one, and leave FailureConfig(snapshot_every=) as it is"
        if now is None
        else f"the job is set back: weights and optimizer state are those after step {now}"
    )
    return raised_by_user(
        f"{failure.peer}{f' on {place.host}' if place else ''}: the optimizer raised in step "
        f"{failure.step + 1}: {failure.error}; parts of the model had the update by then and others "
        f"not, so {then}",
        described_by(failure),
    )
