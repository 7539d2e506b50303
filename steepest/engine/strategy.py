"""A strategy as one frozen description: ways of training differ in its values only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from steepest.compression.codecs import Codec, make_codec
from steepest.config.compression import PowerSGD
from steepest.config.strategies import (
    AllreduceStrategy,
    LocalStrategy,
    ParameterServerStrategy,
    SimpleStrategy,
    StrategyConfig,
)
from steepest.optim.spec import OptimizerSpec
from steepest.protocol.commit_rules import CommitAll, CommitEach, CommitFirst, CommitRule
from steepest.tensors.half_precision import WIRE_DTYPES
from steepest.tensors.layout import ChunkSpec

_ALL = 1 << 30  # more servers than there are
_WHOLE = 1 << 62  # bytes of a chunk: more than a model has


@dataclass(frozen=True)
class Strategy:
    """A way of training, as `make_strategy` reads it from a configuration.

    Allreduce is the synchronous parameter server whose servers live in the workers' own processes,
    on the workers' own weights: each member is in charge of one slice of the chunks. It receives
    its slice of every gradient (a reduce-scatter), updates those weights, whose optimizer state no
    other member keeps (Rajbhandari et al. 2020, stage 1), and all members gather the slices (an
    all-gather). That is 2 (W - 1) / W bytes sent for each byte of the model, as in a ring, in two
    hops instead of 2 (W - 1). Across hosts the gradients of a host are added up in shared memory
    first, and leave it once.

    Local SGD has servers, in the workers' processes or their own, that take the mean change of the
    weights for a gradient. With an outer learning rate of 1 and no momentum the result is the mean
    of the workers' weights.

    Reference: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
    arXiv:1910.02054.
    """

    rule: CommitRule  # how staged pushes become commits
    cut: ChunkSpec  # how models are cut into chunks
    # whether the driver itself is the only server, reached through Ray's object store
    in_driver: bool = False
    in_workers: bool = False  # whether each worker's process is a server's too
    servers: int | None = None  # how many to run; None for one on each node, or in each worker
    replication: int = 1  # how many servers hold each chunk; all, if there are fewer
    # whether servers in a worker's process update the very weights that it computes with
    in_place: bool = True
    # batches of each replica in a step with an update of its own weights after each; 1 for none
    updates: int = 1
    # whether what several workers of a host have in common leaves it and comes to it once
    hierarchical: bool = True
    # what becomes of an update with NaN or infinity: "refuse", "skip" or "pass"
    nonfinite: str = "refuse"
    clip_norm: float | None = None  # the greatest norm of an update's gradient; None for any
    scale_rate: bool = False  # whether the learning rate is divided by the staleness
    # how float32 chunks are pushed, and in which dtype they are pulled; None for as they are
    wire_formats: tuple[Codec | None, torch.dtype | None] = (None, None)
    # how many updates older than the weights rows of tables may be, asked for so many steps before; None to ask for
    # them in the step
    table_staleness: int | None = None
    outer: LocalStrategy | None = None  # of local SGD, which has the outer optimizer's settings

    @property
    def kind(self) -> str:
        """The kind of strategy: "simple", "ps", "allreduce" or "local"."""
        # It says in which processes the state lies: when a strategy follows one of its own kind, what servers hold may
        # stay where it is.
        if self.outer is not None:
            return "local"
        return "simple" if self.in_driver else "allreduce" if self.in_workers else "ps"

    def num_servers(self, nodes: int, workers: int) -> int:
        """Return how many servers to run for a number of workers on a number of nodes."""
        if self.servers is not None:
            return self.servers
        return workers if self.in_workers else max(nodes, self.replication if workers > 1 else 1)

    def server_spec(self, spec: OptimizerSpec) -> OptimizerSpec:
        """Return the optimizer that servers apply: the user's, or the outer one of local SGD."""
        if self.outer is None:
            return spec
        stand_in = torch.nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD(
            [stand_in],
            self.outer.outer_lr,
            momentum=self.outer.outer_momentum,
            nesterov=self.outer.nesterov,
        )
        outer = OptimizerSpec.read(sgd, {id(stand_in): ""})
        ((_, hyper),) = outer.groups
        return replace(outer, groups=((tuple(sorted(spec.trainable())), hyper),))


def make_strategy(config: StrategyConfig) -> Strategy:
    """Return the strategy that a configuration stands for."""
    if isinstance(config, SimpleStrategy):
        return Strategy(
            CommitAll(), ChunkSpec(_WHOLE), in_driver=True, servers=1, clip_norm=config.clip_norm
        )
    pull = config.pull_format
    base = Strategy(
        CommitAll(),
        ChunkSpec(config.chunk_bytes, whole=isinstance(config.push_format, PowerSGD)),
        nonfinite=config.nonfinite,
        clip_norm=config.clip_norm,
        wire_formats=(make_codec(config.push_format), None if pull is None else WIRE_DTYPES[pull]),
    )
    if isinstance(config, AllreduceStrategy):
        replication = config.replication if config.is_sharded else _ALL
        return replace(
            base,
            in_workers=True,
            replication=replication,
            hierarchical=config.hierarchical,
            table_staleness=config.table_staleness,
        )
    if isinstance(config, ParameterServerStrategy):
        return replace(
            base,
            rule=_rule(config),
            servers=config.num_servers,
            replication=config.replication,
            scale_rate=config.correction == "learning_rate",
            table_staleness=config.table_staleness,
        )
    return replace(
        base,
        in_workers=config.num_servers is None,
        servers=config.num_servers,
        replication=config.replication,
        in_place=False,
        updates=config.sync_every,
        hierarchical=config.hierarchical,
        clip_norm=None,  # workers clip what each batch gives
        outer=config,
    )


def _rule(config: ParameterServerStrategy) -> CommitRule:
    """Return the commit rule of a parameter server's mode."""
    if config.mode == "sync":
        return CommitFirst(config.backup_workers) if config.backup_workers else CommitAll()
    if config.mode == "ssp":
        return CommitEach(lead=config.lead)
    return CommitEach(drop_above=config.staleness)
