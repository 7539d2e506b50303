"""Local SGD: workers train by themselves, and servers average their changes.

With an outer learning rate of 1 and no momentum the result is the mean of the workers' weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from steepest.core.config.compression import COMPRESSION_BY_NAME, Compression, Int2, Int4, Int8
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.protocol.commit_rules import CommitAll, CommitRule
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.core.strategies.strategy import ServerStrategy
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ChunkSpec
from steepest.errors import ConfigurationError
from steepest.strategies.compression.codecs import make_codec
from steepest.strategies.delayed_nesterov import DelayedNesterov
from steepest.strategies.formats import WithFormats
from steepest.strategies.rounds import CommitQuorum, RoundCoordinator
from steepest.validation import require_choice, require_count, require_number, require_positive

_ALL = 1 << 30  # more servers than there are


@dataclass(frozen=True, kw_only=True)
class LocalStrategy(WithFormats, ServerStrategy):
    """Local SGD: each worker trains by itself, and the workers' changes are averaged now and then.

    A step is one such round: `sync_every` batches on every replica, each followed by an update of
    the worker's own weights by the model's optimizer (whose schedule counts these updates), then
    one update of all workers' weights by the mean of their changes, with an outer optimizer. With
    `fragments` it is the exchange of one fragment, and a part of that many batches. Train
    with "allreduce" first and go on with `DistributedSGD.set_strategy` for post-local SGD (Lin et
    al. 2020, arXiv:1808.07217).

    Attributes:
        sync_every: batches between two averagings of a weight.
        fragments: parts of the model, each of whole layers and about equally many bytes, that are
            averaged in turn: one after each ``sync_every / fragments`` batches, so that a link has
            that part of the bytes to carry at a time (Douillard et al. 2025, Streaming DiLoCo,
            arXiv:2501.18512). In between a worker has weights of its own for the other fragments;
            they are part of checkpoints, and a dead worker's successor begins with the mean of the
            other workers'.
        delay: batches that a worker computes between sending a fragment's changes and taking in the
            servers' new weights; both travel while it computes, so that it waits for neither on a
            link that needs no longer. Less than ``sync_every / fragments``. With ``pace="speed"`` it counts
            the fastest worker's, of which others compute fewer. Not together with embedding tables on servers,
            nor is `blend`.
        blend: the part of the worker's own weights in those with which it then goes on: 0 for the
            servers' weights, 0.5 for the mean of both.
        quorum: how many workers' changes make a round; the others go on by themselves, and theirs are part
            of the next one, by the weight of their samples, so that nobody waits for a slow worker or one
            that has left (Decoupled DiLoCo, 2026, arXiv:2604.21428). A step is then as many changes as there are
            workers, whichever made them. None for all workers' changes, each from the same weights. With
            `fragments` each worker's change is of one of them, as the rounds take turns; that of a late worker may
            be of another than the others'. Needs `num_servers`.
        grace: seconds for which a round waits for further changes once `quorum` have come, by the
            coordinator's clock. What had come is in the log, so that a replay does not depend on time.
        pace: "equal" for `sync_every` batches of each worker between two exchanges; "speed" for so many of the fastest,
            and of the others as many as they compute meanwhile (dynamic local updates, Liu et al. 2024,
            arXiv:2401.09135), by the times of their earlier ones: so that none waits for another, also with
            all workers' changes in each round. Needs `num_servers`, as `quorum` does.
        outer_lr: learning rate of the outer SGD; 1 without momentum averages the weights (Stich
            2019).
        outer_momentum: momentum of the outer SGD; DiLoCo (Douillard et al. 2023) has
            ``outer_lr=0.7, outer_momentum=0.9, nesterov=True``.
        nesterov: whether that momentum is Nesterov's.
        delayed_nesterov: N for rounds of few workers' changes, of which each is applied at once as 1/N of an
            update, and the momentum moves once in N of them by their mean (Liu et al. 2024, delayed
            Nesterov, arXiv:2401.09135): about ``num_workers / quorum``. With 1 it is
            ``nesterov=True``; None for torch's SGD. Needs `outer_momentum`.
        num_servers: server processes; None for no servers: each worker averages one slice, as in
            "allreduce".
        replication: how many servers or workers hold each slice; with 2 any one may die. What is
            lost is the state of a dead worker's own optimizer: its successor begins with the mean
            of the other workers'.
        clip_norm: the greatest norm of each worker's gradient of one batch, rows of tables
            included, as for `ParameterServerStrategy`.
        nonfinite: as for `AllreduceStrategy`; a round that is skipped leaves workers' own
            optimizers as they were before it.
        compression: `Int8`, `Int4`, `Int2`, `TopK` or `PowerSGD`, or "int8", "int4", "int2", "topk"
            or "powersgd" for their defaults: of workers' changes between hosts. What that leaves out is
            added to the worker's next change of the fragment. With servers weights are sent as they are,
            or as `wire_dtype` says; without, every worker sends its changes to every other worker and
            averages all of them, so that no weights travel.
        weights_compression: `Int8`, `Int4` or `Int2`, or "int8", "int4" or "int2", for what servers send to
            workers of other hosts: the change of the weights since they were sent them. What that leaves out is
            part of the next change. Needs `num_servers`; not together with half precision of weights.
        hierarchical, chunk_bytes, transport, wire_dtype: as for `AllreduceStrategy`.

    Raises:
        ConfigurationError: a value is out of range, `sync_every` is no multiple of `fragments`, or
            Nesterov's momentum is without momentum.
    """

    name = "local"

    sync_every: int = 8
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0
    quorum: int | None = None
    grace: float | None = None
    pace: str = "equal"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    delayed_nesterov: int | None = None
    hierarchical: bool = True
    compression: Compression | str | None = None
    weights_compression: Compression | str | None = None

    def __post_init__(self) -> None:
        require_count("sync_every", self.sync_every)
        if self.sync_every % require_count("fragments", self.fragments):
            raise ConfigurationError(
                f"fragments={self.fragments} with sync_every={self.sync_every}: one fragment is exchanged "
                "after each sync_every / fragments batches, so that this must be a whole number: give "
                f"sync_every={-(-self.sync_every // self.fragments) * self.fragments}, say"
            )
        if require_count("delay", self.delay, 0) >= self.updates:
            raise ConfigurationError(
                f"delay={self.delay} with sync_every={self.sync_every} and fragments={self.fragments}: a "
                f"fragment is taken in before the next one leaves, {self.updates} batches later: give at most "
                f"delay={self.updates - 1}"
            )
        require_number("blend", self.blend, 0, 1, but=1)
        self._check_rounds()
        self._check_copies()
        for name in ("hierarchical", "nesterov"):
            require_choice(name, getattr(self, name), (False, True))
        require_positive("outer_lr", self.outer_lr)
        require_number("outer_momentum", self.outer_momentum, 0, 1, but=1)
        if self.nesterov and not self.outer_momentum:
            raise ConfigurationError(
                "nesterov=True with outer_momentum=0: give the momentum too, 0.9 say"
            )
        if self.delayed_nesterov is not None:
            require_count("delayed_nesterov", self.delayed_nesterov)
            if self.nesterov or not self.outer_momentum:
                raise ConfigurationError(
                    f"delayed_nesterov={self.delayed_nesterov} with nesterov={self.nesterov} and outer_momentum="
                    f"{self.outer_momentum}: it is Nesterov's momentum itself; give outer_momentum, 0.9 say, and "
                    "leave nesterov out"
                )
        self._check_wire()
        self._check_weights()
        if self.in_workers and None not in (self.compression, self.wire_dtype):
            raise ConfigurationError(
                f"wire_dtype={self.wire_dtype!r} with compression={self.compression!r} and no servers: "
                "changes are compressed, and no weights are sent; leave wire_dtype out, or give num_servers"
            )

    def _check_rounds(self) -> None:
        """Check the settings of how many workers' changes make a round."""
        if self.grace is not None:
            require_positive("grace", self.grace)
            if self.quorum is None:
                raise ConfigurationError(
                    f"grace={self.grace} without quorum: it is how long a round waits for further changes once "
                    "quorum workers' have come; give quorum too, or leave grace out"
                )
        require_choice("pace", self.pace, ("equal", "speed"))
        if not self._has_rounds:
            return
        what = f"pace={self.pace!r}"
        if self.quorum is not None:
            what = f"quorum={require_count('quorum', self.quorum)}"
        if self.in_workers:
            raise ConfigurationError(
                f"{what} without servers: a slow worker would hold up the slice that it averages for "
                "the others; give num_servers=1, say"
            )

    @property
    def _has_rounds(self) -> bool:
        """Whether samples are leased, and rounds consist of the changes that have come."""
        return self.quorum is not None or self.pace == "speed"

    @property
    def updates_of_share(self) -> int:
        """Batches of each replica in a share of samples: a single one if a worker gets several shares."""
        return 1 if self.pace == "speed" else self.updates

    def _check_weights(self) -> None:
        """Check in which form weights travel."""
        how = self.weights_compression
        if how is None:
            return
        if not isinstance(how, Int8 | Int4 | Int2):
            require_choice("weights_compression", how, (None, "int8", "int4", "int2"))
        if self.in_workers:
            raise ConfigurationError(
                f"weights_compression={how!r} without servers: no weights are sent to workers with compression=, and "
                "each worker's own slice without; give num_servers=1, say, or leave it out"
            )
        if self.pull_dtype is not None:
            raise ConfigurationError(
                f"wire_dtype={self.wire_dtype!r} with weights_compression={how!r}: both say in which form weights "
                "travel; leave one out"
            )

    @property
    def pull_codec(self) -> Codec | None:
        """The form in which changes of weights are sent."""
        how = self.weights_compression
        return make_codec(COMPRESSION_BY_NAME[how] if isinstance(how, str) else how)

    def check_workers(self, num_workers: int) -> None:
        """Check that there are as many workers as a round needs."""
        if self.quorum is not None and self.quorum > num_workers:
            raise ConfigurationError(
                f"quorum={self.quorum} with num_workers={num_workers}: no round would have the changes of so many; "
                f"give at most {num_workers}, or more workers"
            )

    @property
    def rule(self) -> CommitRule:
        """Which workers' changes make a round."""
        if not self._has_rounds:
            return CommitAll()
        shares = self.updates // self.updates_of_share
        return CommitQuorum(self.quorum, self.grace or 0.0, shares, ahead=self.delay > 0)

    @property
    def coordinator(self) -> type[JobCoordinator]:
        """The class of the job's coordinator."""
        return RoundCoordinator if self._has_rounds else JobCoordinator

    @property
    def copies(self) -> int:
        """How many servers hold each chunk: all workers if changes are compressed and there are no server processes."""
        return _ALL if self.in_workers and self.compression is not None else super().copies

    @property
    def updates(self) -> int:
        """Batches of each replica between two averagings, which may be of different fragments."""
        return self.sync_every // self.fragments

    @property
    def cut(self) -> ChunkSpec:
        """How models are cut into chunks: each of one fragment."""
        return replace(super().cut, fragments=self.fragments)

    @property
    def local(self) -> bool:
        """Whether workers apply the model's optimizer: they do."""
        return True

    @property
    def clips_updates(self) -> float | None:
        """None: workers clip the gradient of each batch."""
        return None

    @property
    def in_workers(self) -> bool:
        """Whether workers average a slice each, without servers."""
        return self.num_servers is None

    @property
    def in_place(self) -> bool:
        """False: a worker computes with weights of its own."""
        return False

    def server_optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """Return the outer SGD, which takes the mean change of the weights for a gradient."""
        stand_in = torch.nn.Parameter(torch.zeros(1))
        sgd: torch.optim.Optimizer
        if self.delayed_nesterov is None:
            sgd = torch.optim.SGD(
                [stand_in], self.outer_lr, momentum=self.outer_momentum, nesterov=self.nesterov
            )
        else:
            sgd = DelayedNesterov(
                [stand_in], self.outer_lr, self.outer_momentum, self.delayed_nesterov
            )
        outer = OptimizerSpec.read(sgd, {id(stand_in): ""})
        ((_, hyper),) = outer.groups
        return replace(outer, groups=((tuple(sorted(spec.trainable())), hyper),))
