"""Local SGD: workers train by themselves for a while, and what they changed is averaged."""

from __future__ import annotations

from dataclasses import replace

import torch

from steepest.config.strategies import LocalStrategy
from steepest.engine.push_pull import ServerStrategy
from steepest.optim.spec import OptimizerSpec


class Local(ServerStrategy):
    """Servers, in the workers' processes or their own, that take the mean change of the weights for a gradient.

    With an outer learning rate of 1 and no momentum that is the mean of the workers' weights.
    """

    in_place = False

    def __init__(self, config: LocalStrategy) -> None:
        super().__init__(config)
        self.in_workers = config.num_servers is None
        self.hierarchical = config.hierarchical
        self.updates = config.sync_every
        self.replication = config.replication
        self._count = config.num_servers
        self.clip_norm = None  # workers clip what each batch gives
        self._config = config

    def num_servers(self, nodes: int, workers: int) -> int:
        """As configured, or one in each worker."""
        return self._count or workers

    def server_spec(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The outer optimizer; the user's own runs in the workers."""
        stand_in = torch.nn.Parameter(torch.zeros(1))
        config = self._config
        sgd = torch.optim.SGD([stand_in], config.outer_lr, momentum=config.outer_momentum, nesterov=config.nesterov)
        outer = OptimizerSpec.read(sgd, {id(stand_in): ""})
        ((_, hyper),) = outer.groups
        return replace(outer, groups=((tuple(sorted(spec.trainable())), hyper),))
