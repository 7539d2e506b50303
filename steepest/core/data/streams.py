"""Streams of batches, and iterable data sets that are divided among replicas by position."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from steepest.core.system import system
from steepest.errors import ConfigurationError

_SKIP_SECONDS = 30.0  # a tenth of the time that a step may take by default


class StreamPlace(NamedTuple):
    """The place of a job in a pass over a stream, which has the same number of batches in each step."""

    # batches of the pass, of all replicas, before the job's first step; negative if it began later
    base: int
    replicas: int  # that take one batch after the other
    micros: int  # batches that each replica takes in a step
    # the same of the pass before, for steps before this one began; None if unknown
    before: StreamPlace | None = None

    def at(self, step: int, micro: int = 0) -> int:
        """Return the number of batches of the pass, or of the one before, before the `micro`-th batches of a step."""
        batches = self.base + (step * self.micros + micro) * self.replicas
        if batches < 0 and self.before is not None:
            return self.before.at(step, micro)
        return max(batches, 0)


class StreamSource:
    """An iterable of batches as a source; begun again when it ends.

    An epoch visits no fixed set of samples, and a restored run begins the stream again, because
    only the iterable knows which samples it gives. `IndexedStream` has none of these limits.

    Args:
        make: returns the batches, which can be iterated over several times.
        data: the user's, for the notice.
        divided: the data set that the batches read, if it is divided among replicas.

    Attributes:
        contents: the data set that is divided, see `steepest.core.data.fingerprint`.
        notice: a text for users.
        begin: batches, those of all replicas, that the next `open` leaves out; if a pass has fewer,
            the next one leaves out the rest.
        passes: the number of passes begun.
        left_out: batches that the present pass leaves out.
        shift: batch n of the present pass belongs to replica (n + shift) modulo their number, so
            that each pass continues with the replica at which the previous one ended.
    """

    size: int | None = None

    def __init__(
        self, make: Callable[[], Iterable[Any]], data: Any, divided: DividedDataset | None = None
    ) -> None:
        self.begin = self.passes = self.left_out = self.shift = 0
        self._make = make
        self._divided = divided
        self.contents = None if divided is None else data
        how = (
            "samples are divided among replicas by position"
            if divided is not None
            else "samples are not divided among replicas"
        )
        self.notice = (
            f"training data is a {type(data).__name__} that chooses its own samples: {how}, epochs "
            "are not exact and a restored run starts the stream anew; an IndexedStream has none of "
            "these limits"
        )

    @property
    def divides(self) -> bool:
        """Whether each replica has a part of the samples."""
        return self._divided is not None

    def divide(self, replica: int, replicas: int) -> None:
        """Take a replica's part of the samples, among all replicas of the job, from the next `open` on."""
        if self._divided is not None:
            self._divided.replica, self._divided.replicas = replica, replicas

    def open(self, shares: Iterable[Any], prefetch: bool = True) -> Iterator[Any]:
        """Yield the iterable's own batches without end, ignoring `shares`; ConfigurationError: it yields nothing."""
        batches, divided = self._make(), self._divided
        begin, self.begin, self.shift = self.begin, 0, 0
        if divided is not None:
            self.shift = -begin % divided.replicas
        while True:
            empty = begin == 0
            if divided is not None:
                divided.begin, divided.shift = begin, self.shift
            one_pass = iter(batches)  # now it has read `begin`, or its processes have
            self.left_out, self.passes = begin, self.passes + 1
            for batch in one_pass:
                empty = False
                yield batch
            if empty:
                raise ConfigurationError(
                    "the stream of batches is empty: give an iterable that can be begun again, and "
                    "that has samples for each replica"
                )
            if divided is not None:
                self.shift = (self.shift + divided.batches_read) % divided.replicas
                begin = max(begin - divided.batches_read, 0)


class DividedDataset(IterableDataset[Any]):
    """An iterable data set that is divided among replicas, and among the processes of their DataLoaders.

    Replicas take `block` samples in turn, and so do the processes of a replica; each reads all of
    the data set for that. If a data set (or `worker_init_fn`) asks
    `torch.utils.data.get_worker_info` for its part, it gets the part of the replica and the process
    together, and all samples that it then yields are taken.

    Args:
        dataset: the user's.
        loader: its DataLoader. Consecutive samples of one part are those of its batch, and samples
            at the end may not make a batch.

    Attributes:
        dataset: the user's.
        replica, replicas: the index of the replica, and the number of replicas.
        begin: blocks that the next pass reads and leaves out, for `_SKIP_SECONDS` or half the
            loader's timeout at most; then it takes its part from there. It is not used for a data
            set that asks for its part.
        shift: of the next pass, see `StreamSource`.
    """

    def __init__(self, dataset: IterableDataset[Any], loader: DataLoader[Any]) -> None:
        self.dataset = dataset
        self.replica, self.replicas = 0, 1
        self.begin = self.shift = 0
        self._block, self._drop_last = loader.batch_size or 1, loader.drop_last
        self._patience = min(_SKIP_SECONDS, loader.timeout / 2 or math.inf)
        self._read = torch.zeros((), dtype=torch.int64)
        if loader.num_workers:  # they write it
            self._read.share_memory_()  # type: ignore[no-untyped-call]
        self._info: _PartInfo | None = None

    @property
    def batches_read(self) -> int:
        """The number of batches in the last pass that has ended, those of all replicas."""
        return int(self._read)

    def __iter__(self) -> Iterator[Any]:
        # a loader has its iterator made at once, and asks for samples later
        return self._samples(self._begin(), self.begin, self.shift)

    def _samples(self, info: _PartInfo, begin: int, shift: int) -> Iterator[Any]:
        """Yield a part of the samples of one pass."""
        if info.parts == 1 and not begin:
            yield from self.dataset
            return
        with _told(info):
            samples = iter(self.dataset)
        first, patience = begin, system().now() + self._patience
        for number in count():
            with _told(info):
                taken = list(islice(samples, 1))
            if not taken:
                break
            block, within = divmod(number, self._block)
            if block < first and not within and system().now() > patience:
                first = block
            if info.asked or (block >= first and self._is_mine(block - begin, begin + shift, info)):
                yield taken[0]
        self._read.fill_(number // self._block if self._drop_last else -(-number // self._block))

    def _is_mine(self, block: int, shift: int, info: _PartInfo) -> bool:
        """Return whether a process takes a block, given its number since the first one taken, and the shift."""
        turn, other = divmod(block - (self.replica - shift) % self.replicas, self.replicas)
        return other == 0 and turn % info.processes == info.process

    def initialise(self, user: Callable[[int], None], number: int) -> None:
        """Call a user's `worker_init_fn` in a process of the DataLoader."""
        with _told(self._begin()):
            user(number)

    def _begin(self) -> _PartInfo:
        real = torch_worker.get_worker_info()
        if self._info is None or real is None:
            self._info = _PartInfo(real, self)
        return self._info


class _PartInfo:
    """The result of `torch.utils.data.get_worker_info` for a data set that is divided."""

    def __init__(self, real: Any, divided: DividedDataset) -> None:
        self.processes: int = 1 if real is None else real.num_workers
        self.process: int = 0 if real is None else real.id
        self.part = divided.replica * self.processes + self.process
        self.parts = divided.replicas * self.processes
        self.dataset = divided.dataset
        self.seed = 0 if real is None else real.seed
        self.asked = False

    @property
    def id(self) -> int:
        self.asked = True
        return self.part

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self.parts


@contextlib.contextmanager
def _told(info: _PartInfo) -> Iterator[None]:
    """Have `torch.utils.data.get_worker_info` return `info` in this context."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_worker._worker_info = before


class _Initialise:
    """A `worker_init_fn` that gives the user's own one the part of the process."""

    def __init__(self, user: Callable[[int], None]) -> None:
        self._user = user

    def __call__(self, number: int) -> None:
        info = torch_worker.get_worker_info()
        assert info is not None
        cast(DividedDataset, info.dataset).initialise(self._user, number)


def divided_stream(loader: DataLoader[Any]) -> StreamSource:
    """Return a loader's iterable data set as a source that is divided among replicas."""
    dataset = cast("IterableDataset[Any]", loader.dataset)
    divided, user = DividedDataset(dataset, loader), loader.worker_init_fn

    def make() -> Iterable[Any]:
        return DataLoader(
            divided,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=None if user is None else _Initialise(user),
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    return StreamSource(make, dataset, divided)
