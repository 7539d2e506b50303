"""What replicas tell an exchange of their batches, where a gradient has more than dense chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.sample_places import Place
from steepest.core.models.protocol import Model


class Companion:
    """What an exchange does while replicas compute: by default nothing, which is all that dense models need.

    `Replicas` calls it on the router's thread, in each step: `begin_share`; for each batch `take`, `begin_batch`, the
    model's passes, `end_batch`; then `end_share`, and `look_ahead` when the report is sent. With an error a share ends
    without the calls that are left.
    """

    #: whether it takes batches before their turn, so that replicas do not
    takes_ahead = False

    def attach(
        self,
        models: Sequence[Model],
        load: Callable[[Place], Any],
        places: Callable[[int], list[Place]],
    ) -> None:
        """Begin to accompany some replicas.

        Args:
            models: of the replicas.
            load: seeds all generators as for the batch of a place, and returns it; to be called in the order of places.
            places: returns the places of a share's batches, in the order in which they are computed.
        """

    def forget(self) -> None:
        """Forget batches that were taken beforehand: others follow."""

    def begin_share(self, places: Sequence[Place], ready: ChunkReady) -> None:
        """Begin the gradient of a share; `ready` takes chunks that can be pushed already."""

    def take(self, place: Place, load: Callable[[Place], Any]) -> Any:
        """Return the batch of a place, as `load` does."""
        return load(place)

    def begin_batch(self, place: Place) -> None:
        """Begin the passes over a batch."""

    def end_batch(self, weight: float) -> None:
        """Note that a batch is computed, and what it weighs."""

    def end_share(self, ready: ChunkReady, updates: int = 1) -> None:
        """End the gradient of a share; `ready` takes its chunks that no model writes.

        Args:
            ready: as in `begin_share`.
            updates: that the worker has made of its own weights meanwhile, each a mean of some batches.
        """

    def look_ahead(self, number: int) -> None:
        """Look at the share after one whose gradient is pushed, if that is to be done now."""

    def squares(self) -> float:
        """Return the sum of the squares of its mean gradient over the batches since `scale`."""
        return 0.0

    def scale(self, factor: float) -> None:
        """Multiply its gradients of the batches since the last call by a factor."""

    def rehearsal(self, model: Model) -> AbstractContextManager[None]:
        """Return a block in which a gradient of a model is computed and dropped."""
        return contextlib.nullcontext()
