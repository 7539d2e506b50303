"""Strategies, the ways of training: frozen, validated when made."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from steepest.config.compression import COMPRESSION_BY_NAME, Compression
from steepest.errors import ConfigurationError
from steepest.validation import require_choice, require_count, require_number, require_positive


def check_copies(num_servers: int | None, replication: int) -> None:
    """Check that there are as many servers as copies of a chunk, if both are given; ConfigurationError otherwise."""
    require_count("replication", replication)
    if num_servers is not None and require_count("num_servers", num_servers) < replication:
        raise ConfigurationError(
            f"replication={replication} with num_servers={num_servers}: each copy is on another "
            "server; give more servers, or leave num_servers out"
        )


#: The ways in which processes communicate, see `ParameterServerStrategy`.
TRANSPORTS = ("wire", "shared", "unix", "tcp", "ray")


@dataclass(frozen=True, kw_only=True)
class SimpleStrategy:
    """Average gradients on the driver, through Ray's object store.

    It is slow, and the reference for the other strategies.

    Attributes:
        clip_norm: the greatest norm of a gradient, as for `ParameterServerStrategy`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    name = "simple"

    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            require_positive("clip_norm", self.clip_norm)


_HALF_DTYPES = (None, "fp16", "bf16")
WireDtype = str | tuple[str | None, str | None] | None


class _OnTheWire:
    """The settings of all strategies in which processes exchange gradients without the driver."""

    chunk_bytes: int | None
    nonfinite: str
    transport: str
    wire_dtype: WireDtype
    clip_norm: float | None
    compression: Compression | str | None = None

    def _check_wire(self, transports: tuple[str, ...] = TRANSPORTS) -> None:
        if self.chunk_bytes is not None:
            require_count("chunk_bytes", self.chunk_bytes)
        require_choice("nonfinite", self.nonfinite, ("refuse", "skip", "pass"))
        require_choice("transport", self.transport, transports)
        if self.clip_norm is not None:
            require_positive("clip_norm", self.clip_norm)
        if isinstance(self.wire_dtype, tuple):
            if len(self.wire_dtype) != 2:
                raise ConfigurationError(
                    f"wire_dtype={self.wire_dtype}: give one, or a pair for pushes and for pulls"
                )
            require_choice("wire_dtype of pushes", self.wire_dtype[0], _HALF_DTYPES)
            require_choice("wire_dtype of pulls", self.wire_dtype[1], _HALF_DTYPES)
        else:
            require_choice("wire_dtype", self.wire_dtype, _HALF_DTYPES)
        if not isinstance(self.compression, Compression):
            require_choice("compression", self.compression, (None, *COMPRESSION_BY_NAME))
        if (
            self.compression is not None
            and isinstance(self.wire_dtype, tuple)
            and self.wire_dtype[0] is not None
        ):
            raise ConfigurationError(
                f"wire_dtype={self.wire_dtype!r} with compression={self.compression!r}: pushes are "
                f"compressed; give wire_dtype={self.wire_dtype[1]!r}, for pulls"
            )

    @property
    def push_format(self) -> Compression | str | None:
        """How gradients are sent between hosts: compressed, "fp16", "bf16"; None for unchanged."""
        if self.compression is not None:
            return (
                COMPRESSION_BY_NAME[self.compression]
                if isinstance(self.compression, str)
                else self.compression
            )
        return self.wire_dtype[0] if isinstance(self.wire_dtype, tuple) else self.wire_dtype

    @property
    def pull_format(self) -> str | None:
        """How weights are sent between hosts: "fp16" or "bf16"; None for unchanged."""
        return self.wire_dtype[1] if isinstance(self.wire_dtype, tuple) else self.wire_dtype


@dataclass(frozen=True, kw_only=True)
class AllreduceStrategy(_OnTheWire):
    """Allreduce without server processes: each worker sums and updates one slice of the weights.

    All workers then gather the updated slices.

    The optimizer's state is thereby sharded: each worker keeps that of its own slice.

    Attributes:
        sharded: False for a whole copy of the optimizer's state in every worker. Each of W workers
            then sends its gradient to every other worker, which sums them: W - 1 times the bytes of
            a gradient instead of 2 (W - 1) / W, and one hop instead of two. None for True, or False
            where gradients are compressed.
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
        wire_dtype: "fp16" or "bf16" to send float32 gradients and new weights between hosts in half
            the bytes; a pair sets it for gradients and for weights. None sends them as they are.
        compression: `Int8`, `TopK` or `PowerSGD`, or "int8", "topk" or "powersgd" for their
            defaults. Where there is more than one host, every worker sends its gradient compressed
            to every other worker; what that leaves out is added to the worker's next gradient. Not
            together with `wire_dtype`.
        clip_norm: the greatest norm of a gradient, as for `ParameterServerStrategy`.
        table_staleness: of embedding tables, as for `ParameterServerStrategy`.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> AllreduceStrategy(wire_dtype="bf16").name
        'allreduce'
    """

    name = "allreduce"

    sharded: bool | None = None
    replication: int = 1
    hierarchical: bool = True
    chunk_bytes: int | None = None
    nonfinite: str = "refuse"
    transport: str = "wire"
    wire_dtype: WireDtype = None
    compression: Compression | str | None = None
    clip_norm: float | None = None
    table_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.table_staleness is not None:
            require_count("table_staleness", self.table_staleness, 0)
        require_choice("sharded", self.sharded, (None, False, True))
        require_count("replication", self.replication)
        require_choice("hierarchical", self.hierarchical, (False, True))
        self._check_wire(tuple(way for way in TRANSPORTS if way != "ray"))
        if self.sharded and self.compression is not None:
            raise ConfigurationError(
                f"sharded=True with compression={self.compression!r}: sharded workers gather new "
                "weights, which compression would damage; leave sharded out, and every worker gets "
                "the compressed gradients"
            )
        if self.compression is not None and self.wire_dtype is not None:
            raise ConfigurationError(
                f"wire_dtype={self.wire_dtype!r} with compression={self.compression!r}: gradients "
                "are compressed, and no weights are sent; leave wire_dtype out"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether each worker keeps a slice of the optimizer's state, rather than all of it."""
        return self.compression is None if self.sharded is None else self.sharded


@dataclass(frozen=True, kw_only=True)
class ParameterServerStrategy(_OnTheWire):
    """Parameter server: servers hold the weights and apply the optimizer to what workers push.

    Attributes:
        mode: which pushes make one update. "sync": the mean of all workers' gradients of a step.
            "async": each worker's gradient by itself, as it arrives. "ssp": as "async", but no
            worker is more than `staleness` steps ahead of the slowest (stale synchronous parallel,
            Ho et al. 2013).
        num_servers: server processes; None for one for each node that has workers, and at least
            `replication`.
        replication: how many servers hold each chunk, on different nodes where there are several.
            All of them apply every update, so that with 2 any one server may die, and the
            coordinator with it, without a loss.
        chunk_bytes: size of a chunk in bytes; None for 1/3 to 4 MB by the size of the model.
        staleness: the bound, in steps for "ssp" (None for 3) and in updates for
            ``correction="drop"``.
        correction: what "async" and "ssp" do about gradients of older weights. None: nothing.
            "learning_rate": divide the learning rate by the staleness (Zhang et al. 2016). "drop":
            above `staleness` drop the gradient, and compute its samples again with newer weights.
        backup_workers: "sync" only: a step takes the first ``num_workers - backup_workers``
            gradients (Chen et al. 2016); the samples of the others are computed in a later step.
        nonfinite: what happens to an update with NaN or infinity. "refuse": an error that names the
            tensor. "skip": it is left out, and counted. "pass": it is applied.
        transport: how processes communicate. "wire": over shared memory and Unix-domain sockets
            inside a host, over TCP between hosts. To force a way: "shared" (shared memory and
            Unix-domain sockets alone; all processes must be on one node), "unix" (as "wire" without
            shared memory), "tcp" (everywhere, as if each process were on a host of its own), "ray"
            (actor calls, for networks where no other port is open).
        wire_dtype: "fp16" or "bf16" to send float32 gradients and weights between hosts in half the
            bytes; servers add up, apply and keep them in float32. A pair sets it for pushes and for
            pulls: ``("fp16", None)``. A chunk that does not fit into fp16 is sent as float32.
        compression: `Int8`, `TopK` or `PowerSGD`, or "int8", "topk" or "powersgd" for their
            defaults. Each worker sends its own gradient compressed to servers of other hosts; what
            that leaves out is added to the worker's next gradient. `wire_dtype` is then that of the
            weights. Not together with backup workers or ``correction="drop"``.
        clip_norm: the whole gradient of an update is scaled by ``min(1, clip_norm / (norm +
            1e-6))``, as `torch.nn.utils.clip_grad_norm_` does it, where `norm` is the 2-norm over
            all parameters that are trained. "async" and "ssp" clip each worker's gradient by
            itself. Not together with backup workers.
        table_staleness: "sync" only, of embedding tables: how many of the last updates the rows
            with which a step computes may lack. With 1 they are asked for a step before they are
            needed, and come while that step computes. From 2 on they are asked for
            ``table_staleness - 1`` steps before, and their gradients travel while the next step
            computes, and are part of that one's update; a worker that dies loses those that it has
            not sent. With 0 the next step's rows are asked for when this one's gradient is sent,
            which changes no number. To know which rows, the module's forward pass over that batch
            is run beforehand, without gradients, up to its last look-up: that part runs twice, so
            it should have no side effects. None asks for rows in the step. Not together with backup
            workers.

    Raises:
        ConfigurationError: a value is out of range, or two do not go together.
    """

    mode: str = "sync"
    num_servers: int | None = None
    replication: int = 1
    chunk_bytes: int | None = None
    staleness: int | None = None
    correction: str | None = None
    backup_workers: int = 0
    nonfinite: str = "refuse"
    transport: str = "wire"
    wire_dtype: WireDtype = None
    compression: Compression | str | None = None
    clip_norm: float | None = None
    table_staleness: int | None = None

    def __post_init__(self) -> None:
        check_copies(self.num_servers, self.replication)
        if self.table_staleness is not None:
            require_count("table_staleness", self.table_staleness, 0)
            if self.mode != "sync":
                raise ConfigurationError(
                    f"table_staleness={self.table_staleness} with mode={self.mode!r}: it is for "
                    "sync; with async and ssp rows are of any version since that of the weights"
                )
            if self.backup_workers:
                raise ConfigurationError(
                    f"table_staleness={self.table_staleness} with backup_workers="
                    f"{self.backup_workers}: which samples a worker computes next is not known "
                    "beforehand, and of a gradient that is dropped the rows would count; leave one "
                    "of them out"
                )
        if self.staleness is not None:
            require_count("staleness", self.staleness, 0)
        require_count("backup_workers", self.backup_workers, 0)
        require_choice("mode", self.mode, ("sync", "async", "ssp"))
        require_choice("correction", self.correction, (None, "learning_rate", "drop"))
        self._check_wire()
        if self.mode != "sync" and self.backup_workers:
            raise ConfigurationError(
                f"backup_workers={self.backup_workers} with mode={self.mode!r}: they are for sync"
            )
        if self.clip_norm is not None and self.backup_workers:
            raise ConfigurationError(
                f"clip_norm={self.clip_norm} with backup_workers={self.backup_workers}: which "
                "gradients a step takes is decided before their mean is formed, so its norm is not "
                "known; leave one of them out"
            )
        if self.compression is not None and (self.backup_workers or self.correction == "drop"):
            raise ConfigurationError(
                f"compression={self.compression!r} with backup_workers={self.backup_workers} and "
                f"correction={self.correction!r}: of a gradient that is dropped nothing would be "
                "left for the next one"
            )
        if self.mode == "sync" and (self.staleness is not None or self.correction is not None):
            raise ConfigurationError(
                "staleness and correction are for async and ssp: with sync nothing is stale"
            )
        if self.mode == "ssp" and self.correction == "drop":
            raise ConfigurationError(
                'correction="drop" is for async: ssp makes workers wait instead'
            )
        if self.mode == "async" and (self.staleness is None) == (self.correction == "drop"):
            raise ConfigurationError(
                f'mode="async" with staleness={self.staleness} and correction={self.correction!r}: '
                'give staleness=, the bound, together with correction="drop", or neither; '
                'mode="ssp" makes workers wait instead'
            )

    @property
    def name(self) -> str:
        """The name for which `DistributedSGD(strategy=...)` makes such a strategy."""
        return "ps" if self.mode == "sync" else self.mode

    @property
    def lead(self) -> int:
        """For "ssp": by how many steps at most a worker is ahead of the slowest."""
        return 3 if self.staleness is None else self.staleness


@dataclass(frozen=True, kw_only=True)
class LocalStrategy(_OnTheWire):
    """Local SGD: each worker trains by itself, and the workers' changes are averaged now and then.

    A step is one such round: `sync_every` batches on every replica, each followed by an update of
    the worker's own weights by the model's optimizer (whose schedule counts these updates), then
    one update of all workers' weights by the mean of their changes, with an outer optimizer. Train
    with "allreduce" first and go on with `DistributedSGD.set_strategy` for post-local SGD (Lin et
    al. 2020, arXiv:1808.07217).

    Attributes:
        sync_every: batches between two averagings.
        outer_lr: learning rate of the outer SGD; 1 without momentum averages the weights (Stich
            2019).
        outer_momentum, nesterov: momentum of the outer SGD, and whether it is Nesterov's; DiLoCo
            (Douillard et al. 2023) has ``outer_lr=0.7, outer_momentum=0.9, nesterov=True``.
        num_servers: server processes; None for no servers: each worker averages one slice, as in
            "allreduce".
        replication: how many servers or workers hold each slice; with 2 any one may die. What is
            lost is the state of a dead worker's own optimizer: its successor begins with the mean
            of the other workers'.
        clip_norm: the greatest norm of each worker's gradient of one batch, rows of tables
            included, as for `ParameterServerStrategy`.
        nonfinite: as for `AllreduceStrategy`; a round that is skipped leaves workers' own
            optimizers as they were before it.
        hierarchical, chunk_bytes, transport, wire_dtype: as for `AllreduceStrategy`.

    Raises:
        ConfigurationError: a value is out of range, or Nesterov's momentum is without momentum.
    """

    name = "local"

    sync_every: int = 8
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    num_servers: int | None = None
    replication: int = 1
    hierarchical: bool = True
    chunk_bytes: int | None = None
    nonfinite: str = "refuse"
    clip_norm: float | None = None
    transport: str = "wire"
    wire_dtype: WireDtype = None

    def __post_init__(self) -> None:
        require_count("sync_every", self.sync_every)
        check_copies(self.num_servers, self.replication)
        for name in ("hierarchical", "nesterov"):
            require_choice(name, getattr(self, name), (False, True))
        require_positive("outer_lr", self.outer_lr)
        require_number("outer_momentum", self.outer_momentum, 0, 1, but=1)
        if self.nesterov and not self.outer_momentum:
            raise ConfigurationError(
                "nesterov=True with outer_momentum=0: give the momentum too, 0.9 say"
            )
        self._check_wire(tuple(way for way in TRANSPORTS if way != "ray"))


StrategyConfig = SimpleStrategy | ParameterServerStrategy | AllreduceStrategy | LocalStrategy
_BY_NAME: dict[str, StrategyConfig] = {
    "simple": SimpleStrategy(),
    "ps": ParameterServerStrategy(),
    "allreduce": AllreduceStrategy(),
    "local": LocalStrategy(),
    "async": ParameterServerStrategy(mode="async"),
    "ssp": ParameterServerStrategy(mode="ssp"),
}
STRATEGY_NAMES = tuple(_BY_NAME)


def as_strategy(strategy: str | StrategyConfig) -> StrategyConfig:
    """Return the strategy with default settings that has this name; a strategy object as it is.

    Case, hyphens, underscores and spaces in a name do not matter.

    Raises:
        ConfigurationError: there is no strategy of that name.
    """
    if isinstance(
        strategy, (SimpleStrategy, ParameterServerStrategy, AllreduceStrategy, LocalStrategy)
    ):
        return strategy
    name = re.sub("[-_ ]", "", strategy).lower() if isinstance(strategy, str) else None
    if name not in _BY_NAME:
        names = ", ".join(repr(name) for name in STRATEGY_NAMES)
        raise ConfigurationError(
            f"strategy={strategy!r}: give one of {names}, or SimpleStrategy(...), "
            "ParameterServerStrategy(...), AllreduceStrategy(...), LocalStrategy(...)"
        )
    return _BY_NAME[name]


def with_servers(config: StrategyConfig, num_servers: int) -> StrategyConfig:
    """Return a strategy with another number of server processes.

    Raises:
        ConfigurationError: the strategy has no server processes, or `num_servers` is no count.
    """
    if isinstance(config, ParameterServerStrategy) or (
        isinstance(config, LocalStrategy) and config.num_servers is not None
    ):
        return replace(config, num_servers=require_count("num_servers", num_servers))
    raise ConfigurationError(
        f"num_servers={num_servers} under {config.name!r}: its servers live in the workers"
    )


def strategy_for(strategy: str | StrategyConfig, num_workers: int) -> StrategyConfig:
    """Return what `as_strategy` returns, for a job of so many workers.

    Args:
        strategy: a name or a strategy object.
        num_workers: the number of workers, at least 1.

    Raises:
        ConfigurationError: there is no such strategy, or it needs more workers.
    """
    config = as_strategy(strategy)
    backup = getattr(config, "backup_workers", 0)
    if backup and backup >= num_workers:
        raise ConfigurationError(
            f"backup_workers={backup} with num_workers={num_workers}: a step would take no "
            "worker's gradient; give fewer backup workers, or more workers"
        )
    return config
