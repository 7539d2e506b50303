"""The messages by which a worker reads rows of embedding tables in the middle of its step."""

from typing import Annotated

from steepest.core.messages.fields import COUNT, FLAG, TEXT
from steepest.core.messages.message import Kind
from steepest.core.messages.schema import Body, Generation, Payload, Sequence, Version, body


@body(Kind.PULL_ROWS)
class PullRows(Body):
    """A request for rows of a group of tables.

    A worker sends it in its forward pass to each server that answers for shards with some of the
    rows of its batch. A server that is at an earlier version answers when it has come to it.
    """

    generation: Generation
    sequence: Sequence  # the worker's count of its requests
    version: Version  # that rows must have at least
    group: Annotated[int, COUNT]  # of tables
    training: Annotated[bool, FLAG] = False  # whether gradients of these rows will be pushed
    # keys of distinct rows, by ascending shard, see `steepest.tables.gradients.pack_keys`
    payload: Payload = None


@body(Kind.ROWS)
class Rows(Body):
    """The values of rows.

    A server sends it to the worker that asked.
    """

    generation: Generation
    sequence: Sequence
    version: Version  # of the rows
    # why there are none, in words: a table has no room for new rows, say
    refused: Annotated[str, TEXT] = ""
    # the values, (n, dim) of the tables' dtype, in the order of the request
    payload: Payload = None
