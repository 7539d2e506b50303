"""The values that fields of messages may hold: types that msgspec checks, and conditions for what it cannot."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

from msgspec import Meta

#: The greatest number in any field. Sums of a few of them fit into 64 bits.
MOST = 1 << 62
#: The greatest weight of a gradient. The square of its inverse is still a float above 0.
HEAVIEST = 1e100
_LARGEST = sys.float_info.max


class Limits(NamedTuple):
    """The numbers of workers, servers and chunks of a job; by default as many as the header of a frame can name."""

    workers: int = 1 << 31
    servers: int = 1 << 31
    chunks: int = 1 << 31


@dataclass(frozen=True, slots=True)
class Condition:
    """What a value must fulfil beside its type, in the annotation of a field."""

    allowed: str  # what is allowed, in words, for errors
    # whether it may be held, in a job of these limits
    fits: Callable[[Any, Limits], bool]


def _is_plain(value: Any, limits: Limits) -> bool:
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, (list, tuple)):
            left += part
        elif isinstance(part, dict):
            left += part.values()
            if not all(isinstance(name, str) for name in part):
                return False
        elif not isinstance(part, (bool, int, float, str, type(None))):
            return False
    return True


#: Values that may be any otherwise: what JSON has, where MessagePack has bytes and times besides.
PLAIN = Condition("null, true, false, numbers, texts, lists or objects of these", _is_plain)
#: An integer from 0.
Count = Annotated[int, Meta(ge=0, lt=MOST)]
Integer = Annotated[int, Meta(ge=-MOST, lt=MOST)]
Number = Integer | float
Finite = Integer | Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
#: A finite number from 0.
Factor = Count | Annotated[float, Meta(ge=0.0, le=_LARGEST)]
#: A weight of a gradient. NaN and infinity are allowed: they make a gradient that is not finite, which servers report.
Weight = Annotated[
    float,
    Condition(
        f"a number from 0 to {HEAVIEST:g}",
        lambda value, limits: 0 <= value <= HEAVIEST or value == math.inf or value != value,
    ),
]
#: A traceback is cut to 20,000 characters.
Text = Annotated[str, Meta(max_length=1 << 16)]
WorkerIndex = Annotated[
    int,
    Meta(ge=0),
    Condition("the index of a worker", lambda value, limits: value < limits.workers),
]
ChunkIndex = Annotated[
    int, Meta(ge=0), Condition("the index of a chunk", lambda value, limits: value < limits.chunks)
]
#: The value of a field that only packages which attach to a job send, in a body of their own derived from its class.
UNUSED = Condition(
    "null, as nothing is attached that knows more", lambda value, limits: value is None
)
#: What a worker's own loop reports: the report's number, its weight in means, and values by name.
Note = tuple[Count, Number, dict[str, Number]]


class StepDigest(NamedTuple):
    """The position of a worker's own loop in an update: if workers commit together, the same on all of them.

    A field that is None is not known, and not compared.
    """

    epoch: int | None
    # the number of the job's step; if loops count their steps, that of the batch or round
    batch: int | None
    step: int | None  # the number of steps that the loop has taken before in the batch
    # the index of the one that steps, in the order of `prepare`; or a constant below
    optimizer: int
    passes: int | None = None  # backward passes since the loop's last step


NO_STEP = -1  # in place of an optimizer: the loop has passed through the batch without a step
RETURNED = -2  # the loop's function has returned

#: Readers of weights: (worker, sequence number of the push that it awaits them for, or 0).
Readers = Sequence[tuple[WorkerIndex, Count]]
#: The learning rate of each parameter group; None for those of the schedule.
Rates = Sequence[Finite] | None
#: Learning rates that a user has set: (step, rates) of each change, by ascending step; the rates of
#: that step, counted from 0, and of those after it up to the next change.
RateChanges = Sequence[tuple[Count, Rates]]
#: Clients that have put a state: (role, index, request number) of each.
Puts = Sequence[tuple[Annotated[str, Meta(pattern=r"\Aclient\Z")], Count, Count]]
#: NaN or infinity: (worker, or -1 for the sum over all; name of the parameter).
Culprits = Sequence[tuple[Annotated[int, Meta(ge=-1, lt=MOST)], Text]]


class _Tally(TypedDict):
    """The coordinator's counters: updates that were committed and left out, pushes that were dropped."""

    committed: Count
    skipped: Count
    dropped: Count
    staleness: Sequence[tuple[Count, Count]]  # in versions, and the number of pushes that had it


class _CoordinatorState(TypedDict, total=False):
    """The state from which another coordinator continues; parts that are missing begin anew."""

    ledger: Annotated[Sequence[Count], Meta(min_length=1)]  # see `Leases.state`
    history: _Tally
    schedule: dict[str, Any]  # see `Schedule.state`
    open: dict[str, Any]  # see `OpenStep.state`


if TYPE_CHECKING:  # who uses them knows more of them than their names
    CoordinatorState = dict[str, Any]
    Hyper = Any
else:
    CoordinatorState = Annotated[_CoordinatorState, PLAIN]
    #: A hyperparameter; tuples for lists, as optimizers have them.
    Hyper = None | bool | Integer | float | Text | tuple[bool | Integer | float, ...]
#: For each parameter group, some of its hyperparameters by name.
HyperByGroup = list[dict[str, Hyper]]
#: The state of a schedule, see `Schedule.state`.
ScheduleState = Annotated[dict[str, Any], PLAIN]
#: Entries of the log, or the parts of one.
Entries = Annotated[list[Any], PLAIN]
