"""How process groups attach to workers."""

from __future__ import annotations

from steepest.core.engine.exchange import Exchange
from steepest.core.engine.extension import Extension
from steepest.core.engine.job import Job
from steepest.core.engine.replicas import Replicas
from steepest.core.transport.router import Router
from steepest.strategies.process_groups.exchange import GroupExchange
from steepest.strategies.process_groups.group import Groups
from steepest.strategies.process_groups.nccl_groups import NcclGroups
from steepest.strategies.process_groups.torch_groups import TorchGroups


class ProcessGroups(Extension):
    """Lets workers add up gradients among themselves if the strategy says so, see `GroupExchange`.

    Args:
        groups: makes process groups; None for those of torch.distributed that the strategy names.
    """

    def __init__(self, groups: Groups | None = None) -> None:
        self.groups = groups

    def around(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, router: Router
    ) -> Exchange:
        """Return a `GroupExchange` around a worker's exchange; ConfigurationError: this process can have no groups."""
        if not job.places.reduces:
            return exchange
        groups = self.groups or (NcclGroups() if job.strategy.reduces_on_gpus else TorchGroups())
        groups.check(router, replicas.home)
        return GroupExchange(exchange, worker, job, router, groups, replicas.home)
