"""How a host's aggregator is made in the process of a server."""

from __future__ import annotations

import torch

from steepest.aggregation.host_aggregator import HostAggregator
from steepest.core.engine.hosting import host_role
from steepest.core.engine.job import Job
from steepest.core.messages.message import aggregator_peer
from steepest.core.transport.router import Router


def host_aggregator(
    router: Router, job: Job, index: int, weights: torch.Tensor, *, shown: bool = True
) -> HostAggregator:
    """Host the aggregator beside a server in this process.

    Args:
        router: of the process.
        job: of the aggregator.
        index: of the aggregator, and of the server.
        weights: the flat vector of the server of this process, which updates its chunks in place.
        shown: see `HostAggregator`.
    """
    peer = aggregator_peer(index)
    aggregator = HostAggregator(
        index,
        job.topology,
        weights,
        router.sender(peer),
        router.own_pending,
        checked=job.strategy.nonfinite != "pass",
        shown=shown,
    )
    host_role(router, job, peer, aggregator)
    return aggregator
