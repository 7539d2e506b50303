"""The parts of gatherings: each worker sends its own to all others, and keeps all for workers that join later."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from steepest.core.models.metric_states import MetricState, is_metric, merged, state_of
from steepest.core.system import system
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.memory import Memory, as_tensor
from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    listed,
)
from steepest.loop.kept import pack, unpack
from steepest.strategies.collectives.members import MemberCollective
from steepest.strategies.collectives.messages import Part

_AGAIN_SECONDS = 1.0  # between two attempts to reach a worker
_PLAIN = (bool, int, float, str)


class Region(enum.IntEnum):
    """A part of a user's loop, by which workers compare their places."""

    BEFORE = 0  # between taking a batch and its step
    AFTER = 1  # after its step
    END = 2  # after an epoch's last batch
    TOP = 3  # between entering an epoch and its first batch


class GatheringPlace(NamedTuple):
    """Where a loop gathers."""

    number: int  # of the batch or round; of the job's step where each worker has batches of its own
    region: Region
    nth: int  # how often it has gathered there before, since the last step, see `Gatherer.begin_step`


class LoopSeat(NamedTuple):
    """The numbers by which a loop takes part in a gathering, or in a batch."""

    rank: int
    size: int  # workers
    drops: int = 0  # how often all that was gathered had been dropped before


@dataclass(frozen=True)
class GatheringParts:
    """A request of a loop that gathers: for the parts of all workers.

    Attributes:
        place: of the gathering.
        own: this worker's part.
        seat: the numbers by which the loop takes part.
        steps: one more than the number of steps that the loop has taken by then; 0 if unknown.
    """

    place: GatheringPlace
    own: torch.Tensor
    seat: LoopSeat
    steps: int = 0


#: What a worker gives where others gather and it does not come by.
_ABSENT = torch.zeros(1, dtype=torch.uint8)


class Gatherings:
    """The parts of gatherings that are in progress, or that a worker may miss that joins later.

    Args:
        steps: returns what `GatheringParts.steps` says of this worker's loop.

    Attributes:
        parts: by place and rank.
    """

    def __init__(self, steps: Callable[[], int] = lambda: 0) -> None:
        self._steps_here = steps
        self.parts: dict[GatheringPlace, dict[int, torch.Tensor]] = {}
        self._steps: dict[GatheringPlace, int] = {}  # the most of those who gather there
        self._waits_at: GatheringPlace | None = None  # where the loop waits
        self._behind = 0  # what was gathered before the batch, or round, of this number is dropped
        self._member: MemberCollective | None = None
        self.drops = 0  # how often all was dropped
        self._wait: Callable[[Callable[[], bool]], None] | None = None
        self._late: list[
            tuple[int, Part, torch.Tensor | None]
        ] = []  # for workers that could not be reached
        self._again = 0.0
        self._here: set[int] = (
            set()
        )  # workers that have asked, since these were known or have changed
        self._ended = False  # whether the loop has ended

    def meet(self, member: MemberCollective, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Use a collective from now on, and send the other workers all parts that are known here."""
        before = self._member
        if before is not None and (before.rank, before.size) != (member.rank, member.size):
            self.drop()
        self._member, self._wait, self._late = member, wait, []
        member.take_part = self._take
        self._here = set()
        for other in range(member.size):
            if other != member.rank:
                self._ask(other)

    def end(self, ended: bool = True) -> None:
        """Note that the loop has ended, and gathers no more; or that it has begun anew."""
        self._ended, self._waits_at = ended, None
        self.answer()

    def answer(self) -> None:
        """Say of what others gather that the loop does not, where it goes on without gathering."""
        if self._member is None:
            return
        rank = self._member.rank
        for place, parts in list(self.parts.items()):
            if (
                rank in parts or place.number < self._behind
            ):  # where it has gathered, and dropped that
                continue
            if self._ended or self._has_passed(place):
                parts[rank] = _ABSENT
                self._tell(place, rank, parts[rank])

    def _has_passed(self, place: GatheringPlace) -> bool:
        """Return whether the loop is beyond a place where others gather, or waits elsewhere between the same steps."""
        there, here = self._steps.get(place, 0), self._steps_here()
        if not there or not here:
            return False
        if there != here or self._waits_at is None:
            return there < here
        # none of those who gather there comes here any more, unless it has been here
        return not self.parts[place].keys() <= self.parts.get(self._waits_at, {}).keys()

    @property
    def seat(self) -> LoopSeat | None:
        """The worker's present seat; None before it knows the other workers."""
        member = self._member
        return None if member is None else LoopSeat(member.rank, member.size, self.drops)

    def put(self, wanted: GatheringParts) -> None:
        """Send the worker's own part to all others, unless a predecessor of the worker has done so."""
        parts, rank = self.parts.setdefault(wanted.place, {}), wanted.seat.rank
        self._waits_at = wanted.place
        if rank not in parts:
            parts[rank] = wanted.own
            self._steps[wanted.place] = max(wanted.steps, self._steps.get(wanted.place, 0))
            self._tell(wanted.place, rank, wanted.own)
        self.answer()

    def found(self, wanted: GatheringParts) -> list[torch.Tensor] | None:
        """Return all parts by rank; None if some have not arrived."""
        self._send_late()
        parts = self.parts.get(wanted.place, {})
        if len(parts) < wanted.seat.size:
            return None
        self._waits_at = None
        return [part for _, part in sorted(parts.items())]

    def wait(self, wanted: GatheringParts) -> None:
        """Return when all parts are here; raise the error that ends the wait."""
        assert self._wait is not None
        self._wait(lambda: self.found(wanted) is not None)

    def drop(self) -> None:
        """Drop all gathered parts: their places may come again with other batches. Loops amid one begin it anew."""
        self.parts.clear()
        self._steps.clear()
        self._waits_at, self._behind = None, 0
        self.drops += 1

    def forget_absent(self) -> None:
        """Forget which workers did not gather where others did: the loops are set back, and may come there now."""
        for place, parts in self.parts.items():
            here = {owner: part for owner, part in parts.items() if part.numel() != _ABSENT.numel()}
            self.parts[place] = here

    def behind_steps(self, before: int) -> list[tuple[int, int, int, int, int, torch.Tensor]]:
        """Return what was gathered behind steps and epochs: number, region, nth, steps, worker and part.

        It is a part of a worker's state: one that has gone on has gathered with others that have yet to.

        Args:
            before: the number of the first batch, or round, whose step the loop has yet to take.
        """
        return [
            (place.number, int(place.region), place.nth, self._steps.get(place, 0), owner, payload)
            for place, parts in self.parts.items()
            if place.region is not Region.BEFORE or place.number < before
            for owner, payload in parts.items()
            if payload.numel() != _ABSENT.numel()
        ]

    def restore(self, gathered: Iterable[tuple[int, int, int, int, int, torch.Tensor]]) -> None:
        """Take what `behind_steps` has returned, tell the others, and ask them for what they have."""
        for number, region, nth, steps, owner, payload in gathered:
            place = GatheringPlace(number, Region(region), nth)
            self.parts.setdefault(place, {}).setdefault(owner, payload)
            self._steps[place] = max(steps, self._steps.get(place, 0))
        if self._member is not None:
            for other in range(self._member.size):
                if other != self._member.rank:
                    self._answer(other)
                    self._ask(other)

    def drop_before(self, number: int) -> None:
        """Drop what was gathered in earlier steps: all workers are past these."""
        self._behind = number
        if self.parts:
            for place in [place for place in self.parts if place.number < number]:
                del self.parts[place]
                self._steps.pop(place, None)

    def _take(self, part: Part, payload: Memory | None) -> None:
        place = GatheringPlace(part.number, Region(part.region), part.sequence)
        if payload is None:
            if part.owner not in self._here:
                self._here.add(part.owner)
                self._ask(part.owner)  # which has perhaps not heard of this worker before
            self._answer(part.owner)
        else:
            self.parts.setdefault(place, {}).setdefault(part.owner, as_tensor(payload))
            self._steps[place] = max(part.steps, self._steps.get(place, 0))
            self.answer()

    def _ask(self, other: int) -> None:
        """Ask another worker for all parts that it knows; it asks in return, and is sent parts from then on."""
        assert self._member is not None
        self._send(other, Part(0, 0, 0, self._member.rank), None)

    def _answer(self, other: int) -> None:
        """Send another worker all parts that are known here."""
        for place, parts in self.parts.items():
            for owner, payload in parts.items():
                self._send(other, self._part(place, owner), payload)

    def _tell(self, place: GatheringPlace, owner: int, payload: torch.Tensor) -> None:
        assert self._member is not None
        part = self._part(place, owner)
        for other in sorted(self._here):
            self._send(other, part, payload)

    def _part(self, place: GatheringPlace, owner: int) -> Part:
        named = place.number, place.nth, int(place.region), owner
        return Part(*named, self._steps.get(place, 0))

    def _send(self, other: int, part: Part, payload: torch.Tensor | None) -> None:
        assert self._member is not None
        try:
            self._member.tell(other, part, payload)
        except (PeerLostError, DeadlineError, ProtocolError):
            self._late.append((other, part, payload))
            self._again = system().now() + _AGAIN_SECONDS

    def _send_late(self) -> None:
        if self._late and system().now() >= self._again:
            late, self._late = self._late, []
            for each in late:
                self._send(*each)


def check_here(parts: Sequence[torch.Tensor], call: str) -> None:
    """Check that all workers gather where one does, by a call; else ConfigurationError."""
    absent = [rank for rank, part in enumerate(parts) if part.numel() == _ABSENT.numel()]
    if absent:
        here = [f"worker {rank}" for rank in range(len(parts)) if rank not in absent]
        raise ConfigurationError(
            f"{call} was called by {listed(here)} where {listed(f'worker {rank}' for rank in absent)} did "
            "not call it: all workers call it equally often, in one order; take it out of what is done by some of them "
            "alone, such as under `if steepest.rank() == 0`"
        )


# -- values ----------------------------------------------------------------------------------------


def is_column(value: Any) -> bool:
    """Return whether a value is a list of numbers or texts, one for each sample."""
    return type(value) is list and all(isinstance(each, _PLAIN) for each in value)


def is_leaf(value: Any) -> bool:
    """Return whether a value is joined as a whole: a tensor, an array, a number, a text, a column or a metric."""
    tensor = isinstance(value, (torch.Tensor, np.ndarray, np.generic, *_PLAIN))
    return tensor or is_column(value) or is_metric(value)


def leaves_of(value: Any) -> dict[str, Any]:
    """Return the tensors, numbers, columns and metrics in a value by the way to them, as Python writes it.

    Raises:
        ConfigurationError: something else is in it.

    Example:
        >>> leaves_of({"a": (1, [2, 3]), "b": [torch.ones(2)]})
        {"['a'][0]": 1, "['a'][1]": [2, 3], "['b'][0]": tensor([1., 1.])}
    """
    leaves: dict[str, Any] = {}

    def look(value: Any, way: str) -> None:
        if is_leaf(value):
            if way in leaves:
                raise ConfigurationError(
                    f"steepest.gather() was given two keys that read alike, at value{way}: give other keys"
                )
            leaves[way] = value
        elif isinstance(value, (Mapping, list, tuple)):
            for key, each in _items(value):
                look(each, f"{way}[{key!r}]")
        else:
            raise ConfigurationError(
                f"steepest.gather() was given a {type(value).__name__}: give tensors, arrays, numbers, lists of "
                "numbers or texts, metrics of TorchMetrics, and dicts, lists and tuples of these"
            )

    look(value, "")
    return leaves


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys, or places, of a dict, a list or a tuple, and what is there."""
    return value.items() if isinstance(value, Mapping) else enumerate(value)


def rebuilt(value: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a value with other leaves, by the ways of `leaves_of`; dicts keep the order of the leaves."""
    places = {way: at for at, way in enumerate(leaves)}

    def build(value: Any, way: str) -> tuple[int, Any]:
        """Return the place of the first leaf in a value, and the value with other leaves."""
        if is_leaf(value):
            return places[way], leaves[way]
        parts = [(key, *build(each, f"{way}[{key!r}]")) for key, each in _items(value)]
        first = min((place for _, place, _ in parts), default=0)
        if isinstance(value, Mapping):
            return first, {key: each for key, _, each in sorted(parts, key=lambda part: part[1])}
        values = [each for _, _, each in parts]
        return first, type(value)(*values) if hasattr(value, "_fields") else type(value)(values)

    return build(value, "")[1]


def packed(value: Any, counts: bool = True) -> torch.Tensor:
    """Return the leaves of a value as bytes for `joined`; without rows, if the value does not count."""
    rows = {way: as_rows(leaf) for way, leaf in leaves_of(value).items()}
    return pack({"leaves": rows if counts else _none_of(rows)})


def _none_of(leaves: Any) -> Any:
    """Return leaves of the same kinds without rows."""
    if isinstance(leaves, dict):
        return {way: leaf[:0] for way, leaf in leaves.items()}
    return [leaf[:0] for leaf in leaves]


def as_rows(leaf: Any) -> Any:
    """Return what is joined of a leaf: a tensor with a row for each of its values, or a column."""
    if is_column(leaf):
        return leaf
    if is_metric(leaf):
        state = state_of(leaf)
        return pack({"updates": state.updates, "tensors": dict(state.tensors)})
    if isinstance(leaf, str):
        return [leaf]
    tensor = torch.as_tensor(leaf).detach()
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


#: Has a tensor that is joined follow a worker's own: called with that, the joined one, and the places of its rows.
Follow = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def joined(
    value: Any,
    parts: Sequence[torch.Tensor],
    order: Sequence[Sequence[int]],
    rank: int = 0,
    follow: Follow | None = None,
) -> Any:
    """Return all workers' values as one: their rows one behind the other, in the form of a worker's own.

    Args:
        value: the worker's own.
        parts: as `packed`, by rank.
        order: by rank, the places of the samples of which it may be that there is a row each.
        rank: the worker's.
        follow: what is called for tensors that require a gradient, if anything.

    Raises:
        ConfigurationError: the workers have given values of other forms.
    """
    own, everything = leaves_of(value), [unpack(part)["leaves"] for part in parts]
    _check_same(everything)
    wholes = {}
    for way in everything[0]:
        leaf, of_leaf = own[way], [leaves[way] for leaves in everything]
        if is_metric(leaf):
            wholes[way] = merged(leaf, [_state(part) for part in of_leaf if len(part)])
            continue
        places = _places([len(part) for part in of_leaf], order)
        whole = _like(leaf, _join(of_leaf, places))
        if follow is not None and requires_gradient(leaf):
            mine = sum(len(part) for part in of_leaf[:rank])
            rows = torch.arange(mine, mine + len(of_leaf[rank]))
            if places is not None:
                rows = torch.tensor(places).argsort()[rows]
            whole = follow(leaf, whole, rows)
        wholes[way] = whole
    return rebuilt(value, wholes)


def recorded(value: Any) -> torch.Tensor:
    """Return what `joined` has returned as bytes, for a worker that joins later."""
    leaves = leaves_of(value).items()
    return pack(
        {"leaves": {way: as_rows(each) if is_metric(each) else each for way, each in leaves}}
    )


def from_record(value: Any, record: torch.Tensor) -> Any:
    """Return the result of `joined` on other workers from its record, in the form of a worker's own value."""
    own, leaves = leaves_of(value), unpack(record)["leaves"]
    restored = {
        way: merged(own[way], [_state(each)]) if is_metric(own.get(way)) else each
        for way, each in leaves.items()
    }
    return rebuilt(value, restored)


def _state(part: torch.Tensor) -> MetricState:
    """Return what `as_rows` was given of a metric."""
    content = unpack(part)
    return MetricState(content["updates"], Tensors(content["tensors"]))


def _check_same(everything: Sequence[Mapping[str, Any]]) -> None:
    """Check that all workers give leaves of the same kinds at the same places; ConfigurationError otherwise."""
    first = everything[0]
    for rank, leaves in enumerate(everything):
        for way in {**first, **leaves}:
            here, there = _kind(first.get(way)), _kind(leaves.get(way))
            if here != there:
                raise ConfigurationError(
                    f"steepest.gather() was given values of different structures: at value{way} worker 0 has {here}, "
                    f"worker {rank} {there}; give dicts of the same keys, and lists and tuples of the same length, on "
                    "all workers, with 0 or a tensor without rows for what a worker has not found"
                )


def _kind(rows: Any) -> str:
    """Return a description of what `as_rows` returned; None for a leaf that a worker has not given."""
    if rows is None:
        return "nothing"
    return "a list or a text" if is_column(rows) else "a tensor or a number"


def requires_gradient(leaf: Any) -> bool:
    """Return whether gradients flow through the gathered rows of a leaf."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def alone(value: Any) -> Any:
    """Return what `joined` returns of a single worker's value: the same, with numbers as tensors of one row."""
    return rebuilt(value, {way: _alone(leaf) for way, leaf in leaves_of(value).items()})


def _alone(leaf: Any) -> Any:
    if is_metric(leaf):
        return merged(leaf, [state_of(leaf)])
    if requires_gradient(leaf):
        return leaf.reshape(1) if leaf.dim() == 0 else leaf
    return _like(leaf, as_rows(leaf))


class Gathered(torch.autograd.Function):
    """What was gathered of a tensor, as a function of a worker's own rows of it."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        whole: torch.Tensor,
        rows: torch.Tensor,
        summed: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the rows of all workers; `summed`: returns the sum of all workers' gradients of them."""
        ctx.shape, ctx.rows, ctx.summed = own.shape, rows, summed
        return whole.view_as(whole)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the worker's own rows; none where they do not count."""
        own = ctx.summed(gradient)[ctx.rows.to(gradient.device)]
        if own.numel() == 0:
            own = gradient.new_zeros(ctx.shape)
        return own.reshape(ctx.shape), None, None, None


def _places(lengths: list[int], order: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the order of the rows of all workers, as indices; None if they are in order."""
    if lengths != [len(each) for each in order]:
        return None
    places = [place for each in order for place in each]
    return sorted(range(len(places)), key=places.__getitem__)


def _join(parts: list[Any], places: list[int] | None) -> Any:
    column = isinstance(parts[0], list)
    rows: Any = [each for part in parts for each in part] if column else _concatenated(parts)
    if places is None:
        return rows
    return [rows[i] for i in places] if isinstance(rows, list) else rows[places]


def _concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    rows = [part for part in parts if part.dim() != 1 or part.numel()] or parts[:1]
    try:
        return torch.cat(rows)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"steepest.gather() was given tensors of shapes {sorted({tuple(part.shape) for part in parts})}: give such "
            f"as differ in their first dimension alone ({error})"
        ) from None


def _like(own: Any, whole: Any) -> Any:
    """Return what was found in the form of a worker's own leaf."""
    if isinstance(own, torch.Tensor):
        return whole.to(own.device)
    return whole.numpy() if isinstance(own, np.ndarray) else whole
