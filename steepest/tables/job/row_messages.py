"""The messages about rows of embedding tables, and the parts of reports, logs and reads that concern rows."""

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Row
from typing import NamedTuple

from steepest.core.engine.commit_log import LoggedPush
from steepest.core.messages.fields import ChunkIndex, Count, Text
from steepest.core.messages.gradients import Report
from steepest.core.messages.message import MessageKind
from steepest.core.messages.permissions import Line, lines
from steepest.core.messages.schema import Body, body
from steepest.core.messages.snapshots import Read, ReadOn, Snapshot
from steepest.core.tensors.allocator import Recycler
from steepest.core.tensors.shared_memory import SHARED_FROM, Reusable

#: Of this process. Blocks are never freed: a process that has mapped one keeps the mapping.
ROW_MEMORY = Recycler(Reusable(), least=SHARED_FROM, most=sys.maxsize, rounded=True)


class RowKind(MessageKind):
    """The kinds of messages about rows."""

    PULL_ROWS = 51
    ROWS = 52


@body(RowKind.PULL_ROWS)
class PullRows(Body, frozen=True):
    """A request for the rows of look-ups, each in one group of tables.

    A worker sends it to each server that answers for shards with some of the rows of its batch: before it computes the
    batch, or in its forward pass. A server that is at an earlier version answers when it has come to it. The payload
    has the keys of rows, look-up by look-up: distinct, by ascending shard, see `pack_keys` of `rows.gradients`.
    """

    generation: Count
    sequence: Count  # the worker's count of its requests
    version: Count  # that rows must have at least
    # of each look-up the group of tables, its number of rows here, and whether gradients of these will be pushed
    lookups: Row[tuple[Count, Count, bool]]


@body(RowKind.ROWS)
class Rows(Body, frozen=True):
    """The values of rows.

    A server sends it to the worker that asked. The payload has by look-up the values, (n, dim) as the tables' rows
    travel, in the order of the request, at multiples of 8 bytes.
    """

    generation: Count
    sequence: Count
    version: Count  # of the rows
    # why there are none, in words: a table has no room for new rows, say
    refused: Text = ""


class RowsOfPush(NamedTuple):
    """The field `more` of a push with gradients of rows, in its REPORT and in the log."""

    # (count, version): so many requests for rows, in the order in which the gradient needed them, were answered at
    # that version; empty where all were at the version of the weights, or there were none
    versions: Row[tuple[Count, Count]] = ()
    # whether the push has the gradients of rows of its own samples, where those of rows are pushed a step late; it has
    # those of the step before either way
    own: bool = False

    @classmethod
    def of(cls, push: LoggedPush) -> "RowsOfPush":
        """Return the log's entry for a push."""
        return cls(*push.more)


#: Rows that a reader has: (chunk, life, version) of shards of tables, see `TableShard.life`.
Bases = Row[tuple[ChunkIndex, Count, Count]]


class RowsToRead(NamedTuple):
    """Which rows a reader of opaque chunks wants, as options of its READ: by default all that a checkpoint has."""

    table: Count | None = (
        None  # number of a table in its group, of which the values alone are wanted
    )
    # the rows that the reader has: of these shards it is sent what has changed, if known, or all rows
    since: Bases = ()
    # the number of a snapshot that servers keep on disk, of tables that have one; 0 for none
    keep: Count = 0


#: The key of the record that stands for a piece that a server has written: JSON of "files" that are written, as a
#: manifest has them, and the number of the snapshot for which they are "kept", or 0; or of an "error".
WRITTEN = "written_files"
#: The keys of the records of what a shard is, which come with its first piece, written or not.
MARKS = ("updates", "seed", "clock", "since", "life")


class RowsInto(NamedTuple):
    """Where servers write rows instead of sending them, as options of a READ_ON.

    A reader that leaves it out after it had given it wants no more.
    """

    folder: Text  # of a checkpoint: a path or URL
    stamp: Text  # of the names of its files


class ReportOfRows(Report, frozen=True):
    """A REPORT in a job with tables."""

    more: RowsOfPush | None = None


class ReadOfRows(Read, frozen=True):
    """A READ in a job with tables."""

    options: RowsToRead | None = None


class SnapshotOfRows(Snapshot, frozen=True):
    """A SNAPSHOT in a job with tables."""

    options: RowsToRead | None = None


class ReadOnInto(ReadOn, frozen=True):
    """A READ_ON in a job with tables."""

    options: RowsInto | None = None


#: The messages of a job with tables beside those of dense models, and what these may say there.
LINES: Mapping[Line, type[Body]] = lines(
    {
        ("worker", "server"): (PullRows,),
        ("server", "worker"): (Rows,),
        ("worker", "coordinator"): (ReportOfRows,),
        ("client", "server"): (ReadOnInto,),
        ("client", "coordinator"): (ReadOfRows,),
        ("coordinator", "server"): (SnapshotOfRows,),
    }
)
