"""`Strategy`: what the engine asks of a way of training, the library's or a user's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from steepest.core.optim.spec import OptimizerSpec
from steepest.core.protocol.commit_rules import CommitAll, CommitRule
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ChunkSpec
from steepest.core.transport.channel import TRANSPORTS
from steepest.errors import ConfigurationError
from steepest.validation import require_choice, require_count, require_positive


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way of training: which pushes make an update, and how they travel; what servers do, and where they are.

    The engine knows no strategy by name: it reads these properties. To write your own strategy,
    derive from `ParameterServerStrategy` (servers have processes of their own) or
    `AllreduceStrategy` (each worker updates a slice), and override some of

    - `rule`: which of the staged gradients make the next update (`steepest.core.protocol.commit_rules`);
    - `codec`: the form in which a worker pushes its gradient, and how pushes are added up;
    - `server_optimizer`: the optimizer that servers apply to the sum;
    - `name`, which messages show.

    A strategy is a frozen dataclass, equal to another with the same settings, and travels to every
    process by pickle. See `docs/howto/own_strategy.md`.

    Attributes:
        clip_norm: the greatest norm of a gradient, as for `ParameterServerStrategy`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            require_positive("clip_norm", self.clip_norm)

    @property
    def name(self) -> str:
        """The name in messages: by default that of the class."""
        return type(self).__name__

    # -- which pushes make an update -----------------------------------------------------------

    @property
    def rule(self) -> CommitRule:
        """How staged pushes become updates: by default one push of every worker makes one."""
        return CommitAll()

    @property
    def coordinator(self) -> type[JobCoordinator]:
        """The class of the job's coordinator, for a rule that depends on more than the staged pushes."""
        return JobCoordinator

    @property
    def updates(self) -> int:
        """Batches of each replica in a step with an update of its own weights after each; 1 for none."""
        return 1

    @property
    def updates_of_share(self) -> int:
        """The updates in one share of samples: all, unless a worker may get several shares at a time."""
        return self.updates

    @property
    def local(self) -> bool:
        """Whether workers apply the model's optimizer to weights of their own, and push their changes."""
        return False

    @property
    def delay(self) -> int:
        """Batches that a worker with weights of its own computes before it takes in the last exchange."""
        return 0

    @property
    def grace(self) -> float | None:
        """Seconds for which a round waits for further pushes once it has enough; None for rules that do not wait."""
        return None

    @property
    def blend(self) -> float:
        """The part of the worker's own weights in the weights that it then goes on with; 0 for the servers' alone."""
        return 0.0

    # -- how they travel -----------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """How processes communicate: one of `TRANSPORTS`."""
        return "wire"

    @property
    def cut(self) -> ChunkSpec:
        """How models are cut into chunks."""
        return ChunkSpec()

    @property
    def codec(self) -> Codec | None:
        """The form in which workers push float32 gradients; None to push them unchanged."""
        return None

    @property
    def pull_dtype(self) -> torch.dtype | None:
        """The dtype in which float32 weights are sent to other hosts; None for their own."""
        return None

    @property
    def pull_codec(self) -> Codec | None:
        """The form in which other hosts are sent changes of weights; None to send weights.

        It is for a strategy whose workers are sent every version that changes a chunk.
        """
        return None

    @cached_property
    def wire_formats(self) -> tuple[Codec | None, torch.dtype | None]:
        """`codec` and `pull_dtype`; each process of a job has one codec."""
        return self.codec, self.pull_dtype

    @property
    def hierarchical(self) -> bool:
        """Whether the gradients of a host's workers leave it as one sum, and weights come to it once."""
        return True

    # -- what servers do, and where they are ---------------------------------------------------

    def server_optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """Return the optimizer that servers apply, given the model's: by default the same."""
        return spec

    @property
    def nonfinite(self) -> str:
        """The treatment of an update with NaN or infinity: "refuse", "skip" or "pass"."""
        return "refuse"

    @property
    def clips_updates(self) -> float | None:
        """The greatest norm of an update's gradient; None for any."""
        return self.clip_norm

    @property
    def scale_rate(self) -> bool:
        """Whether the learning rate is divided by the staleness of the update's gradient."""
        return False

    @property
    def in_driver(self) -> bool:
        """Whether the driver itself is the only server."""
        return False

    @property
    def in_workers(self) -> bool:
        """Whether each worker's process is a server's too."""
        return False

    @property
    def reduces(self) -> bool:
        """Whether workers add up gradients among themselves, and push the sum to their own servers.

        An extension adds them up, see `Extension.around`. It needs `in_workers`, and all of the state in each worker.
        """
        return False

    @property
    def reduces_on_gpus(self) -> bool:
        """Whether workers add up gradients (see `reduces`) on the GPUs of their models, one for each worker.

        Weights, the sum of gradients and the optimizer's state then lie there, and updates are made there.
        """
        return False

    @property
    def reduces_in(self) -> torch.dtype | None:
        """The dtype in which workers add up float32 gradients among themselves; None for float32."""
        return None

    @property
    def in_place(self) -> bool:
        """Whether servers in a worker's process update in place the weights that it computes with."""
        return True

    @property
    def copies(self) -> int:
        """How many servers hold each chunk; all, if there are fewer."""
        return 1

    @property
    def kind(self) -> str:
        """The place of the job's state: a change between strategies of one kind leaves the state where it is."""
        if self.local:
            return "local"
        return "simple" if self.in_driver else "allreduce" if self.in_workers else "ps"

    @property
    def has_servers(self) -> bool:
        """Whether the number of servers is a setting, and any one of them may be missing."""
        return False

    def servers_for(self, nodes: int, workers: int) -> int:
        """Return how many servers to run for a number of workers on a number of nodes."""
        return workers if self.in_workers else max(nodes, self.copies if workers > 1 else 1)

    def with_servers(self, num_servers: int) -> Strategy:
        """Return the same strategy with another number of server processes.

        Raises:
            ConfigurationError: it has none, or `num_servers` is no count.
        """
        raise ConfigurationError(
            f"num_servers={num_servers} under {self.name!r}: its servers live in the workers"
        )

    def with_at_most(self, servers: int) -> Strategy:
        """Return the same strategy for a job with fewer servers than it has."""
        return self

    def check_workers(self, num_workers: int) -> None:
        """Check that a job may have `num_workers` workers; ConfigurationError: it needs more."""


@dataclass(frozen=True, kw_only=True)
class WireStrategy(Strategy):
    """A strategy whose processes exchange gradients without the driver.

    Attributes:
        chunk_bytes, nonfinite, transport: see `ParameterServerStrategy`.
    """

    chunk_bytes: int | None = None
    nonfinite: str = "refuse"
    transport: str = "wire"

    def _check_wire(self) -> None:
        super().__post_init__()
        if self.chunk_bytes is not None:
            require_count("chunk_bytes", self.chunk_bytes)
        require_choice("nonfinite", self.nonfinite, ("refuse", "skip", "pass"))
        require_choice("transport", self.transport, TRANSPORTS)

    @property
    def cut(self) -> ChunkSpec:
        """Chunks of `chunk_bytes`."""
        return ChunkSpec(self.chunk_bytes)


@dataclass(frozen=True, kw_only=True)
class ServerStrategy(WireStrategy):
    """A strategy that may have server processes.

    Attributes:
        num_servers, replication: see `ParameterServerStrategy`.
    """

    num_servers: int | None = None
    replication: int = 1

    def _check_copies(self) -> None:
        """Check that there are as many servers as copies of a chunk, if both are given."""
        require_count("replication", self.replication)
        servers = self.num_servers
        if servers is not None and require_count("num_servers", servers) < self.replication:
            raise ConfigurationError(
                f"replication={self.replication} with num_servers={servers}: each copy is on another "
                "server; give more servers, or leave num_servers out"
            )

    @property
    def copies(self) -> int:
        """How many servers hold each chunk."""
        return self.replication

    @property
    def has_servers(self) -> bool:
        """Whether the number of servers is a setting, and any one of them may be missing."""
        return True

    def servers_for(self, nodes: int, workers: int) -> int:
        """Return `num_servers`, or as many as there are nodes."""
        return super().servers_for(nodes, workers) if self.num_servers is None else self.num_servers

    def with_servers(self, num_servers: int) -> Strategy:
        """Return the same strategy with another number of server processes."""
        if self.in_workers:
            return super().with_servers(num_servers)
        return replace(self, num_servers=require_count("num_servers", num_servers))

    def with_at_most(self, servers: int) -> Strategy:
        """Return the same strategy with `servers` servers, and no more copies than these."""
        return replace(self, num_servers=servers, replication=min(self.replication, servers))
