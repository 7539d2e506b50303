"""The batches of one worker's replicas: loaded in the order of its shares, the next one perhaps ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steepest.core.data.sampler import SamplePlan, step_seed
from steepest.core.data.streams import StreamPlace
from steepest.core.engine.generators import HeldGenerators, seed_everything
from steepest.core.engine.sample_places import Place, SamplePlaces
from steepest.core.models.protocol import Model
from steepest.core.system import system
from steepest.errors import ModelError

if TYPE_CHECKING:
    from steepest.core.data.streams import StreamPlace


_ENDED = object()  # in place of a further batch of a source


class OpenStreams:
    """The streams of a worker's replicas.

    A stream cannot yield a batch again, so the batches of the last share are kept: it is computed again if another
    process dies.
    """

    def __init__(self, replicas: int) -> None:
        # by replica, where the job is in its stream's pass; None before it is opened
        self.places: list[StreamPlace | None] = [None] * replicas
        self._passes = [
            -1
        ] * replicas  # passes of each stream that had begun when its place was noted
        self._batches: dict[Place, Any] = {}

    def begin(self, replica: int, source: Any, step: int, micro: int) -> None:
        """Set where a stream that is about to be opened begins: at the job's place in its pass.

        Args:
            step, micro: of the next batch; `micro` counts the replica's batches of the step.
        """
        if hasattr(source, "passes"):
            place = self.places[replica]
            source.begin = 0 if place is None else place.at(step, micro)
            self._passes[replica] = -1

    def took(
        self, replica: int, source: Any, at: tuple[int, int], part: tuple[int, int], micros: int
    ) -> None:
        """Note where a pass begins, if the batch taken at (step, micro) is the replica's first of it.

        Args:
            part: the replica's index among all of the job, and their number.
            micros: batches of a replica in a step.
        """
        passes = getattr(source, "passes", -1)
        if passes == self._passes[replica]:
            return
        self._passes[replica] = passes
        (step, micro), (index, replicas) = at, part
        # the number of that batch in its pass
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


@dataclass(frozen=True)
class _Loaded:
    """A batch that was loaded before its turn."""

    place: Place
    batch: Any  # None if loading it raised
    error: BaseException | None
    # as they were after it was loaded; None if the model seeds them
    generators: HeldGenerators | None
    seconds: float  # that loading it took


class BatchLoader:
    """Loads the batches of a worker's replicas, each once, with the random generators seeded for its place.

    Used on the thread of the process' router.

    Args:
        models: one for each replica, with its data.
        places: of the batches among the samples of each step.
        division: index of the first replica among those of the job, and their number.
        leased: whether shares come one by one, so that the next one is not known ahead of time.
        seed: of the job.

    Attributes:
        places: as given; see `divide`.
        seed: of the job.
        seconds_ahead: that loading a batch of the last share took while its weights were awaited.
    """

    def __init__(
        self,
        models: Sequence[Model],
        places: SamplePlaces,
        division: tuple[int, int],
        *,
        leased: bool,
        seed: int,
    ) -> None:
        self._now = system().now
        self._models = models
        self.places = places
        self._division = division
        self._opened = division  # by which open streams are divided
        self._leased = leased
        self.seed = seed
        #: by replica: the share and number of the next micro-batch, and the iterator that yields it
        self._batches: list[tuple[tuple[int, int], Iterator[Any]] | None] = [None] * len(models)
        self._loaded: _Loaded | None = None  # a batch of a step to come
        self._streams = OpenStreams(len(models))
        self.seconds_ahead = 0.0

    def use(self, plan: SamplePlan | None, seed: int) -> bool:
        """Set the sample plan, and the seed of the job; return whether all loaded batches were dropped.

        Divided streams are opened again if this worker has another part of them now.

        Args:
            plan: None when the data are streams, which go on where they are.
        """
        redivided = self._division != self._opened and _divides(self._models[0].data)
        self._opened = self._division
        dropped = plan is not None or self.places.plan is not None or redivided
        if dropped:
            self._drop()
        self.places.use(plan)
        self.seed = seed
        return dropped

    def divide(self, places: SamplePlaces, division: tuple[int, int]) -> None:
        """Load another worker's batches, by the same plan."""
        places.use(self.places.plan)
        self.places, self._division = places, division

    def continue_from(self, other: BatchLoader) -> None:
        """Continue where an earlier loader of the same models was in the data."""
        self._batches, self._loaded = other._batches, other._loaded
        self._streams, self._opened = other._streams, other._opened

    def of_other(self, first: int) -> BatchLoader:
        """Return a loader of another worker's batches, given the index of its first replica; this one is unchanged."""
        division = first, self._division[1]
        return BatchLoader(self._models, self.places, division, leased=True, seed=self.seed)

    def reopen(self, replica: int) -> None:
        """Have a replica's source opened again for its next batch."""
        self._batches[replica] = None

    @property
    def stream_place(self) -> StreamPlace | None:
        """Where the job is in its pass over a stream; None where that is not known."""
        return self._streams.places[0]

    def continue_streams(self, place: StreamPlace | None) -> bool:
        """Set where the job is in its pass over streams that are opened from now on; None to begin them anew.

        Return whether all loaded batches were dropped.
        """
        self._streams.places = [place] * len(self._models)
        dropped = place is None and self.places.plan is None
        if dropped:
            self._drop()
        return dropped

    def skip(self) -> None:
        """Have streams yield new batches if the last share is computed again: its batches would raise again."""
        self._streams.forget_batches()

    def load_ahead(self, number: int) -> None:
        """Load the first batch of a share ahead of time, unless a batch is loaded; `load` raises what this meets."""
        if self._loaded is None and (places := self.places.of(number)):
            batch: Any = None
            error: BaseException | None = None
            began = self._now()
            try:
                batch = self._load(places[0])
            except BaseException as raised:  # noqa: BLE001 - the user's code may call sys.exit()
                error = raised
            seconds = self._now() - began
            held = None if self._model_seeds(places[0]) else HeldGenerators()
            self._loaded = _Loaded(places[0], batch, error, held, seconds)

    def load(self, place: Place) -> Any:
        """Seed all generators as for the batch of a place, and return the batch."""
        if self.places.plan is not None:
            return self._take(place)
        if (kept := self._streams.kept(place)) is not None:
            self._seed_for(place)
            return kept
        batch = self._take(place)
        self._streams.keep(place, batch)
        return batch

    def _drop(self) -> None:
        """Drop all batches that are loaded, and have sources opened again."""
        self._streams.forget_batches()
        self._batches = [None] * len(self._models)
        self._loaded = None

    def _take(self, place: Place) -> Any:
        """Seed all generators as for the batch of a place; return it, perhaps loaded beforehand."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or (loaded.place != place and self.places.plan is not None):
            return self._load(place)
        self.seconds_ahead = loaded.seconds
        if loaded.error is not None:
            raise loaded.error
        if loaded.place != place:  # a stream goes on where it is
            self._seed_for(place)
        elif loaded.generators is not None:
            loaded.generators.go_on()
        return loaded.batch

    def _model_seeds(self, place: Place) -> bool:
        """Return whether a place's model seeds all generators itself when it takes its batch."""
        seeds: bool = getattr(self._models[place[1]].data, "model_seeds", False)
        return seeds

    def _seed_for(self, place: Place) -> None:
        """Seed all generators for the batch of a place, unless data are streams and its model seeds them."""
        if self.places.plan is None and self._model_seeds(place):
            return
        step, part = self.places.step_of(place[0]), self.places.part_of(place)
        seed_everything(step_seed(self.seed, step, part))

    def _load(self, place: Place) -> Any:
        """Seed all generators for the batch of a place, and return the batch that the source has."""
        self._seed_for(place)
        number, replica, micro = place
        return self._next_batch(number, replica, micro, self.places.counts(number)[replica])

    def _next_batch(self, number: int, replica: int, micro: int, count: int) -> Any:
        """Return the next micro-batch of a replica; `count` of them are not empty in the share."""
        kept, source, places = self._batches[replica], self._models[replica].data, self.places
        step, plan = places.step_of(number), places.plan
        if kept is None or (plan is not None and kept[0] != (number, micro)):
            kept = (number, micro), self._open((number, replica, micro))
        self._batches[replica] = None  # an iterator that raises is exhausted
        batch = next(kept[1], _ENDED)
        if batch is _ENDED and getattr(source, "each_epoch", False):
            kept = (number, micro), self._open((number, replica, micro))
            batch = next(kept[1], _ENDED)
        if batch is _ENDED:
            raise ModelError(
                "the source of the training data ended: its open() must yield a batch for each "
                "share"
            )
        if plan is None and _divides(source):
            first, replicas = self._division
            self._streams.took(
                replica, source, (step, micro), (first + replica, replicas), places.micros
            )
        # In the next step the replica has the same place.
        following = (number, micro + 1) if micro + 1 < count else (number + places.shares, 0)
        self._batches[replica] = (following, kept[1])
        return batch

    def _open(self, place: Place) -> Iterator[Any]:
        """Open the source of a place's replica for the batches from that place on."""
        (number, replica, micro), places = place, self.places
        source = self._models[replica].data
        if (divide := getattr(source, "divide", None)) is not None:
            divide(self._division[0] + replica, self._division[1])
        if places.plan is None and _divides(source):
            self._streams.begin(replica, source, places.step_of(number), micro)
        shares = places.indices(place, of_epoch=getattr(source, "each_epoch", False))
        return source.open(shares, prefetch=not self._leased)


def _divides(source: Any) -> bool:
    """Return whether a source gives each replica a part of its samples."""
    return hasattr(source, "divide") and getattr(source, "divides", True)
