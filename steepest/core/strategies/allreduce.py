"""Allreduce: the synchronous parameter server whose servers live in the workers' own processes.

Each member is in charge of one slice of the chunks. It receives its slice of every gradient (a
reduce-scatter), updates those weights, whose optimizer state no other member keeps (Rajbhandari et al.
2020, ZeRO stage 1, arXiv:1910.02054), and all members gather the slices (an all-gather). That is 2 (W - 1) / W
bytes sent for each byte of the model, as in a ring, in two hops instead of 2 (W - 1). Across hosts the
gradients of a host are added up in shared memory first, and leave it once.
"""

from __future__ import annotations

from dataclasses import dataclass

from steepest.core.strategies.strategy import WireStrategy
from steepest.validation import require_choice, require_count

_ALL = 1 << 30  # more servers than there are


@dataclass(frozen=True, kw_only=True)
class AllreduceStrategy(WireStrategy):
    """Allreduce without server processes: each worker sums and updates one slice of the weights.

    All workers then gather the updated slices.

    The optimizer's state is thereby sharded: each worker keeps that of its own slice.

    Attributes:
        sharded: False for a whole copy of the optimizer's state in every worker. Each of W workers
            then sends its gradient to every other worker, which sums them: W - 1 times the bytes of
            a gradient instead of 2 (W - 1) / W, and one hop instead of two. None for True.
        replication: how many workers hold, and update, each slice; with 2 any one worker may die
            without a loss.
        hierarchical: on several hosts, whether the gradients of a host's workers are summed in its
            shared memory before they leave it, and weights are sent to each host once; otherwise to
            each worker.
        chunk_bytes: size of a chunk in bytes; None for 1/3 to 4 MB by the size of the model.
        nonfinite: what happens to an update with NaN or infinity: "refuse", "skip" or "pass", as
            for `ParameterServerStrategy`.
        transport: how processes communicate: "wire", "shared", "unix" or "tcp", as for
            `ParameterServerStrategy`.
        clip_norm: the greatest norm of a gradient, as for `ParameterServerStrategy`.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> AllreduceStrategy(replication=2).name
        'allreduce'
    """

    name = "allreduce"

    sharded: bool | None = None
    replication: int = 1
    hierarchical: bool = True

    def __post_init__(self) -> None:
        require_choice("sharded", self.sharded, (None, False, True))
        require_count("replication", self.replication)
        require_choice("hierarchical", self.hierarchical, (False, True))
        self._check_wire()

    @property
    def is_sharded(self) -> bool:
        """Whether each worker keeps a slice of the optimizer's state, rather than all of it."""
        return self.sharded is not False

    @property
    def in_workers(self) -> bool:
        """Whether each worker's process also hosts a server, which is in charge of a slice."""
        return True

    @property
    def copies(self) -> int:
        """How many workers hold each slice: all, unless the state is sharded."""
        return self.replication if self.is_sharded else _ALL
