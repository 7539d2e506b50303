"""Allreduce: the members add their gradients up among themselves, and none of them is a server by trade.

Each member is in charge of one slice of the chunks. It receives its slice of every gradient (a reduce-scatter), updates
those weights, whose optimizer state nobody else keeps (Rajbhandari et al. 2020, stage 1), and everybody gathers the
slices (an all-gather). That is 2 (W - 1) / W bytes sent for each byte of the model, as in a ring, in two hops instead
of 2 (W - 1). Across hosts a host's gradients are added up in shared memory first, and leave it once.

Reference: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv:1910.02054.
"""

from __future__ import annotations

from steepest.config.strategies import AllreduceStrategy
from steepest.engine.push_pull import ServerStrategy


class Allreduce(ServerStrategy):
    """The synchronous parameter server whose servers live in the workers' own processes, on the workers' own weights.

    Staged, committed and applied as ever: a member that dies or stops leaves the gradients as they were.
    """

    in_workers = True

    def __init__(self, config: AllreduceStrategy) -> None:
        super().__init__(config)
        self.hierarchical = config.hierarchical
        self.replication = config.replication if config.is_sharded else 1 << 30  # everybody

    def num_servers(self, nodes: int, workers: int) -> int:
        """One in each worker."""
        return workers
