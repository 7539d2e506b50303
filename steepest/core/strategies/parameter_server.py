"""Parameter servers: synchronous, with backup workers, asynchronous, stale synchronous parallel."""

from __future__ import annotations

from dataclasses import dataclass

from steepest.core.protocol.commit_rules import (
    NO_NORM,
    CommitAll,
    CommitEach,
    CommitFirst,
    CommitRule,
)
from steepest.core.strategies.strategy import ServerStrategy
from steepest.errors import ConfigurationError
from steepest.validation import require_choice, require_count


@dataclass(frozen=True, kw_only=True)
class ParameterServerStrategy(ServerStrategy):
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
            shared memory), "tcp" (everywhere, as if each process were on a host of its own).
        clip_norm: the whole gradient of an update is scaled by ``min(1, clip_norm / (norm +
            1e-6))``, as `torch.nn.utils.clip_grad_norm_` does it, where `norm` is the 2-norm over
            all parameters that are trained. "async" and "ssp" clip each worker's gradient by
            itself. Not together with backup workers.

    Raises:
        ConfigurationError: a value is out of range, or two do not go together.
    """

    mode: str = "sync"
    staleness: int | None = None
    correction: str | None = None
    backup_workers: int = 0

    def __post_init__(self) -> None:
        self._check_copies()
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
            raise ConfigurationError(NO_NORM.format(f"clip_norm={self.clip_norm}"))
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
        """The name by which `DistributedSGD(strategy=...)` makes such a strategy."""
        return "ps" if self.mode == "sync" else self.mode

    @property
    def lead(self) -> int:
        """For "ssp": the most steps by which a worker is ahead of the slowest."""
        return 3 if self.staleness is None else self.staleness

    @property
    def rule(self) -> CommitRule:
        """The rule of the mode."""
        if self.mode == "sync":
            return CommitFirst(self.backup_workers) if self.backup_workers else CommitAll()
        return (
            CommitEach(self.lead) if self.mode == "ssp" else CommitEach(drop_above=self.staleness)
        )

    @property
    def scale_rate(self) -> bool:
        """Whether the learning rate is divided by the staleness."""
        return self.correction == "learning_rate"

    def check_workers(self, num_workers: int) -> None:
        """Check that a step takes the gradient of at least one worker."""
        if self.backup_workers and self.backup_workers >= num_workers:
            raise ConfigurationError(
                f"backup_workers={self.backup_workers} with num_workers={num_workers}: a step would "
                "take no worker's gradient; give fewer backup workers, or more workers"
            )
