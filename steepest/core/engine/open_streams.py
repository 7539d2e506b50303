"""Streams as one worker's replicas have them open: where in a pass, and the batches of the last share."""

from __future__ import annotations

from typing import Any

from steepest.core.data.stream_place import StreamPlace
from steepest.core.engine.sample_places import Place


class OpenStreams:
    """The streams of a worker's replicas."""

    # A stream cannot be asked for a batch once more: the batches of the last share are kept, for the case that it is
    # computed again because another process died.

    def __init__(self, replicas: int) -> None:
        # by replica, where the job is in its stream's pass; None before it is opened
        self.places: list[StreamPlace | None] = [None] * replicas
        self._passes = [-1] * replicas  # of each stream, that were begun when its place was noted
        self._batches: dict[Place, Any] = {}

    def begin(self, replica: int, source: Any, step: int, micro: int) -> None:
        """Have a stream about to be opened begin where the job is in its pass."""
        # step, micro: of its next batch, the number among the replica's own.
        if hasattr(source, "passes"):
            place = self.places[replica]
            source.begin = 0 if place is None else place.at(step, micro)
            self._passes[replica] = -1

    def took(
        self, replica: int, source: Any, at: tuple[int, int], part: tuple[int, int], micros: int
    ) -> None:
        """Note where a pass begins, if the batch taken at (step, micro) is the replica's first of it."""
        # part: the replica's index among all of the job, and how many these are; micros: its batches in a step.
        passes = getattr(source, "passes", -1)
        if passes == self._passes[replica]:
            return
        self._passes[replica] = passes
        (step, micro), (index, replicas) = at, part
        # of that batch in its pass
        number = source.left_out + (index - source.shift - source.left_out) % replicas
        base = number - index - (step * micros + micro) * replicas
        before = self.places[replica]
        before = None if before is None else before._replace(before=None)
        self.places[replica] = StreamPlace(base, replicas, micros, before)

    def keep(self, place: Place, batch: Any) -> None:
        """Keep a batch until one of another share is kept."""
        if any(number != place[0] for number, _, _ in self._batches):
            self._batches.clear()
        self._batches[place] = batch

    def kept(self, place: Place) -> Any:
        """Return the batch of a place in the last share; None if it is not kept."""
        return self._batches.get(place)

    def forget_batches(self) -> None:
        """Keep no batch."""
        self._batches.clear()
