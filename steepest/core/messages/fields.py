"""The values that a field of a message may hold: predicates, one schema of them for each kind."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, starmap
from typing import Any, NamedTuple

from steepest.core.messages.message import WHOLE, Peer, PushId

#: The greatest number in any field. Sums of a few of them fit into 64 bits.
MOST = 1 << 62
#: The greatest weight of a gradient. The square of its inverse is still a float above 0.
HEAVIEST = 1e100
#: Characters of a text: a traceback is cut to 20,000.
_TEXT = 1 << 16
# Errors show the outer levels of a value: its whole `repr` may be long, and lists within a thousand lists have none.
_shown = reprlib.Repr()
_shown.maxlist = _shown.maxtuple = _shown.maxdict = 16
_shown.maxstring = _shown.maxother = 80


_LISTS = {list, tuple}
_INTEGERS = {int}


class Limits(NamedTuple):
    """The numbers of workers, servers and chunks of a job; by default the most of a header."""

    workers: int = 1 << 31
    servers: int = 1 << 31
    chunks: int = 1 << 31


@dataclass(frozen=True, slots=True)
class Field:
    """The values that one field of a message may hold."""

    allowed: str  # these values, in words, for errors
    # whether it may hold a value, in a job of these limits; never raises, whatever arrived
    fits: Callable[[Any, Limits], bool]
    # converts what arrived to the type that the sender's field had; None where it is the same
    read: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a message of one kind from one role to another."""

    # fields of `Message.meta` that any role reads, by name; others are ignored
    meta: Mapping[str, Field] = field(default_factory=dict)
    required: tuple[str, ...] = ()  # the names of those that must be there
    # limits of fields in the header, by attribute, beside those of version and chunk
    header: Mapping[str, Field] = field(default_factory=dict)
    # the kind's own names for the header's attributes, for errors
    names: Mapping[str, str] = field(default_factory=dict)
    lowest_chunk: int = WHOLE  # that it may have; 0 of messages about one chunk
    weighs: bool = False  # whether its weight and total say what its payload weighs


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and -MOST < value < MOST)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _TEXT


def _is_plain(value: Any) -> bool:
    """Return whether a value can be a hyperparameter: a number, bool, text, None, or a list of numbers and bools."""
    single = value is None or isinstance(value, bool) or _is_number(value) or _is_text(value)
    return single or (
        _is_list(value) and all(_is_number(part) or isinstance(part, bool) for part in value)
    )


COUNT = Field(
    "an integer from 0 to 2**62", lambda value, limits: type(value) is int and 0 <= value < MOST
)
ZERO = Field("0", lambda value, limits: value == 0)
NUMBER = Field("a number", lambda value, limits: _is_number(value))
FINITE = Field("a finite number", lambda value, limits: _is_number(value) and math.isfinite(value))
FACTOR = Field(
    "a finite number from 0",
    lambda value, limits: _is_number(value) and value >= 0 and math.isfinite(value),
)
ZERO_OR_ONE = Field("0 or 1", lambda value, limits: value in (0, 1))
FLAG = Field("true or false", lambda value, limits: isinstance(value, bool))
TEXT = Field(f"a text of at most {_TEXT} characters", lambda value, limits: _is_text(value))
WORKER = Field(
    "the index of a worker",
    lambda value, limits: type(value) is int and 0 <= value < limits.workers,
)
CHUNK = Field(
    "the index of a chunk", lambda value, limits: type(value) is int and 0 <= value < limits.chunks
)
RECORD = Field("an object", lambda value, limits: isinstance(value, dict))
ANYTHING = Field("anything", lambda value, limits: True)
#: What only those who attach to a job may send, with limits of their own.
UNUSED = Field("null, as nothing is attached that knows more", lambda value, limits: value is None)


def one_of(*words: str) -> Field:
    """Return a field that holds one of these words."""
    return Field(
        " or ".join(map(repr, words)),
        lambda value, limits: isinstance(value, str) and value in words,
    )


NOTE = Field(
    "a count, a number and an object of numbers",
    lambda value, limits: (
        _is_list(value)
        and len(value) == 3
        and type(value[0]) is int
        and value[0] >= 0
        and _is_number(value[1])
        and isinstance(value[2], dict)
        and all(map(_is_number, value[2].values()))
    ),
)
NOTED = Field(
    "the index of a worker, a count, a number and an object of numbers",
    lambda value, limits: (
        _is_list(value)
        and len(value) == 4
        and type(value[0]) is int
        and 0 <= value[0] < limits.workers
        and NOTE.fits(value[1:], limits)
    ),
)
SPENT = Field(  # checked for each push of each step, so in few calls
    "the index of a worker and three numbers of seconds",
    lambda value, limits: (
        _is_list(value)
        and [*map(type, value)] == [int, float, float, float]
        and 0 <= value[0] < limits.workers
    ),
)


def many(each: Field) -> Field:
    """Return a field that holds a list of any length, each element of which fits `each`."""
    fits = each.fits
    return Field(
        f"a list, of each {each.allowed}",
        lambda value, limits: _is_list(value) and all(fits(part, limits) for part in value),
    )


def by_worker(width: int) -> Field:
    """Return a field of a list of lists of `width` integers, the first a worker's index.

    It checks a whole list at once, because a COMMIT may have many elements.
    """
    lengths = {width}

    def fits(value: Any, limits: Limits) -> bool:
        if not _is_list(value):
            return False
        kinds = set(map(type, value))
        if (
            not (kinds <= _LISTS or all(issubclass(kind, tuple) for kind in kinds))
            or set(map(len, value)) - lengths
        ):
            return False
        flat = list(chain.from_iterable(value))
        if not flat:
            return True
        return (
            set(map(type, flat)) == _INTEGERS
            and min(flat) >= 0
            and max(flat) < MOST
            and max(flat[::width]) < limits.workers
        )

    return Field(
        f"a list of lists of {width}: the index of a worker, and integers from 0 to 2**62", fits
    )


def some(each: Field) -> Field:
    """Return a field that holds a list of one or more elements, each of which fits `each`."""
    other = many(each)
    return Field(
        f"{other.allowed}, not empty",
        lambda value, limits: other.fits(value, limits) and len(value) > 0,
    )


def each_of(*parts: Field) -> Field:
    """Return a field that holds a list of as many elements as `parts`, each fit for its part."""
    checks = tuple(part.fits for part in parts)

    def fits(value: Any, limits: Limits) -> bool:
        if not _is_list(value) or len(value) != len(checks):
            return False
        return all(check(part, limits) for check, part in zip(checks, value, strict=True))

    return Field("a list of " + ", ".join(part.allowed for part in parts), fits)


def numbers_by_name() -> Field:
    """Return a field that holds an object whose values are numbers."""
    return Field(
        "an object of numbers",
        lambda value, limits: (
            isinstance(value, dict)
            and (set(map(type, value.values())) <= {float} or all(map(_is_number, value.values())))
        ),
    )


def plain_by_name() -> Field:
    """Return a field that holds an object whose values are hyperparameters."""
    return Field(
        "an object of plain values",
        lambda value, limits: (
            isinstance(value, dict) and all(_is_plain(part) for part in value.values())
        ),
    )


class StepDigest(NamedTuple):
    """The position of a worker's own loop in an update: if workers commit together, the same on all of them.

    A field that is None is not known, and not compared.
    """

    epoch: int | None
    # the number of the job's step; if loops count their steps, that of the batch or round
    batch: int | None
    step: int | None  # the number of steps that the loop has taken before in the batch
    optimizer: (
        int  # the index of the one that steps, in the order of `prepare`; or a constant below
    )
    passes: int | None = None  # backward passes since the loop's last step


NO_STEP = -1  # in place of an optimizer: the loop has passed through the batch without a step
RETURNED = -2  # the loop's function has returned

_DIGEST_TYPES = {int, type(None)}
DIGEST = Field(  # checked for each push of each step, so in one call
    f"a list of {len(StepDigest._fields)}, of each an integer or null",
    lambda value, limits: (
        isinstance(value, (list, tuple))
        and len(value) == len(StepDigest._fields)
        and {*map(type, value)} <= _DIGEST_TYPES
        and value[3] is not None
    ),
    StepDigest._make,
)


def _hyper(value: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return hyperparameters with tuples for lists, as optimizers have them."""
    return [
        {name: tuple(part) if isinstance(part, list) else part for name, part in group.items()}
        for group in value
    ]


HYPER = replace(many(plain_by_name()), read=_hyper)


def nothing_or(other: Field) -> Field:
    """Return a field that holds null, or a value of another field."""
    read = other.read
    return Field(
        f"null, or {other.allowed}",
        lambda value, limits: value is None or other.fits(value, limits),
        read if read is None else lambda value: None if value is None else read(value),
    )


def whole(schema: Schema) -> Field:
    """Return a field that holds an object with the fields of a schema's `meta`; it may have others, too."""
    fields = schema.meta.items()
    return Field(
        "an object with " + ", ".join(f"{name}: {part.allowed}" for name, part in fields),
        lambda value, limits: isinstance(value, dict) and unfit(schema, value, limits) is None,
    )


def unfit(schema: Schema, values: Mapping[str, Any], limits: Limits) -> str | None:
    """Return what is wrong with the first of a message's named values that is missing or wrong, else None."""
    fields = schema.meta
    for name in schema.required:
        if name not in values:
            return f"{name} is missing: give {fields[name].allowed}"
    for name, value in values.items():
        part = fields.get(name)
        if part is not None and not part.fits(value, limits):
            return f"{name}={_shown.repr(value):.80}: give {part.allowed}"
    return None


def _pushes(value: Iterable[Iterable[int]]) -> tuple[PushId, ...]:
    return tuple(starmap(PushId, value))


#: Pushes: (worker, incarnation, sequence number) of each.
PUSHES = replace(by_worker(3), read=_pushes)
#: Readers of weights: (worker, sequence number of the push that it awaits them for, or 0).
READERS = by_worker(2)
#: The learning rate of each parameter group; None for those of the schedule.
Rates = Sequence[float] | None
#: Learning rates that a user has set: (step, rates) of each change, by ascending step; the rates of
#: that step, counted from 0, and of those after it up to the next change.
RateChanges = Sequence[tuple[int, Rates]]
RATES = many(each_of(COUNT, nothing_or(many(FINITE))))
PEER = replace(
    each_of(one_of("coordinator", "server", "worker", "client", "aggregator", "member"), COUNT),
    read=lambda value: Peer(*value),
)
#: Clients that have put a state: (role, index, request number) of each.
PUTS = many(each_of(one_of("client"), COUNT, COUNT))
#: NaN or infinity: (worker, or -1 for the sum over all; name of the parameter).
CULPRITS = many(
    each_of(Field("an integer from -1", lambda v, limits: type(v) is int and -1 <= v < MOST), TEXT)
)
_COUNTS = ("committed", "skipped", "dropped")
_HISTORY = Schema(
    {**dict.fromkeys(_COUNTS, COUNT), "staleness": many(each_of(COUNT, COUNT))},
    required=(*_COUNTS, "staleness"),
)
#: The state from which another coordinator continues; parts that are missing begin anew.
STATE = whole(Schema({"ledger": some(COUNT), "history": whole(_HISTORY), "schedule": RECORD}))
