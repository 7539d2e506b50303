"""The messages about rows of embedding tables, and what others say of rows: in reports, logs and reads of the state."""

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Row
from typing import Annotated, NamedTuple

from steepest.core.engine.commit_log import LoggedPush
from steepest.core.messages.fields import (
    CHUNK,
    COUNT,
    FLAG,
    TEXT,
    Field,
    Schema,
    each_of,
    many,
    nothing_or,
    whole,
)
from steepest.core.messages.gradients import Report
from steepest.core.messages.message import MessageKind
from steepest.core.messages.permissions import Line, lines
from steepest.core.messages.schema import (
    Body,
    Generation,
    Sequence,
    Version,
    body,
    limited,
)
from steepest.core.messages.snapshots import Options, Read, ReadOn, Snapshot
from steepest.core.tensors.allocator import Recycler
from steepest.core.tensors.shared_memory import SHARED_FROM, Reusable

#: Of this process. Blocks are never freed: a process that has mapped one keeps the mapping.
ROW_MEMORY = Recycler(Reusable(), least=SHARED_FROM, most=sys.maxsize, rounded=True)


class RowKind(MessageKind):
    """The kinds of messages about rows."""

    PULL_ROWS = 51
    ROWS = 52


@body(RowKind.PULL_ROWS)
class PullRows(Body):
    """A request for the rows of look-ups, each in one group of tables.

    A worker sends it to each server that answers for shards with some of the rows of its batch: before it computes the
    batch, or in its forward pass. A server that is at an earlier version answers when it has come to it. The payload
    has the keys of rows, look-up by look-up: distinct, by ascending shard, see `steepest.tables.gradients.pack_keys`.
    """

    generation: Generation
    sequence: Sequence  # the worker's count of its requests
    version: Version  # that rows must have at least
    # of each look-up the group of tables, its number of rows here, and whether gradients of these will be pushed
    lookups: Annotated[Row[tuple[int, int, bool]], many(each_of(COUNT, COUNT, FLAG))]


@body(RowKind.ROWS)
class Rows(Body):
    """The values of rows.

    A server sends it to the worker that asked. The payload has by look-up the values, (n, dim) as the tables' rows
    travel, in the order of the request, at multiples of 8 bytes.
    """

    generation: Generation
    sequence: Sequence
    version: Version  # of the rows
    # why there are none, in words: a table has no room for new rows, say
    refused: Annotated[str, TEXT] = ""


class RowsOfPush(NamedTuple):
    """The field `more` of a push with gradients of rows, in its REPORT and in the log."""

    # (count, version): so many requests for rows, in the order in which the gradient needed them, were answered at
    # that version; empty where all were at the version of the weights, or there were none
    versions: Row[Row[int]] = ()
    # whether the push has the gradients of rows of its own samples, where those of rows are pushed a step late; it has
    # those of the step before either way
    own: bool = False

    @classmethod
    def of(cls, push: LoggedPush) -> "RowsOfPush":
        """Return the log's entry for a push."""
        return cls(*push.more)


#: Rows that a reader has: (chunk, life, version) of shards of tables, see `TableShard.life`.
Bases = Row[Row[int]]


class RowsToRead(NamedTuple):
    """Which rows a reader of opaque chunks wants: by default all that a checkpoint has."""

    table: int | None = None  # number of a table in its group, of which the values alone are wanted
    # the rows that the reader has: of these shards it is sent what has changed, if known, or all rows
    since: Bases = ()
    # the number of a snapshot that servers keep on disk, of tables that have one; 0 for none
    keep: int = 0

    @classmethod
    def of(cls, options: Options | None) -> "RowsToRead":
        """Return the rows that the options of a READ or SNAPSHOT ask for."""
        return cls(**(options or {}))

    def options(self) -> Options | None:
        """Return it as options; None where all rows are wanted."""
        options: Options = {} if self.table is None else {"table": self.table}
        options |= {"since": self.since} if self.since else {}
        return options | ({"keep": self.keep} if self.keep else {}) or None


#: The key of the record that stands for a piece that a server has written: JSON of "files" that are written, as a
#: manifest has them, and by shard's name "marks", in the order of `MARKS`, -1 for none; or of an "error".
WRITTEN = "written_files"
MARKS = ("updates", "seed", "clock", "since", "life")


class RowsInto(NamedTuple):
    """Where servers write rows instead of sending them; without it a reader that has said so wants no more."""

    folder: str  # of a checkpoint: a path or URL
    stamp: str  # of the names of its files

    def options(self) -> Options:
        """Return it as options of a READ_ON."""
        return {"into": list(self)}

    @classmethod
    def of(cls, options: Options | None) -> "RowsInto | None":
        """Return the place that the options of a READ_ON name."""
        return cls(*options["into"]) if options else None


_MORE = nothing_or(each_of(many(each_of(COUNT, COUNT)), FLAG))
_WANTED = {"table": COUNT, "since": many(each_of(CHUNK, COUNT, COUNT)), "keep": COUNT}
_OPTIONS = Field(
    f"null, or {whole(Schema(_WANTED)).allowed}, and nothing else",
    lambda value, limits: (
        value is None
        or (whole(Schema(_WANTED)).fits(value, limits) and value.keys() <= _WANTED.keys())
    ),
)
_INTO = Field(
    'null, or {"into": [folder, stamp]}',
    lambda value, limits: (
        value is None
        or (whole(Schema({"into": each_of(TEXT, TEXT)})).fits(value, limits) and len(value) == 1)
    ),
)
#: The messages of a job with tables beside those of dense models, and what these may say there.
LINES: Mapping[Line, Schema] = {
    **lines(
        {
            ("worker", "server"): (PullRows,),
            ("server", "worker"): (Rows,),
        }
    ),
    (Report.KIND, "worker", "coordinator"): limited(Report.SCHEMA, more=_MORE),
    (ReadOn.KIND, "client", "server"): limited(ReadOn.SCHEMA, options=_INTO),
    (Read.KIND, "client", "coordinator"): limited(Read.SCHEMA, options=_OPTIONS),
    (Snapshot.KIND, "coordinator", "server"): limited(Snapshot.SCHEMA, options=_OPTIONS),
}
