"""Collective operations between workers, named as in torch.distributed, for users' functions."""

from steepest.strategies.collectives.operations import (
    Receiving,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    irecv,
    isend,
    rank,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    size,
    using,
)

__all__ = [
    "Receiving",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "size",
    "using",
]
