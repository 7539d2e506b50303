"""One job: the facts that all its processes share, and the description of its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import nsmallest

import torch

from steepest.core.data.fingerprint import Fingerprint, RowHashes, unlike_rows
from steepest.core.data.protocol import Blocks
from steepest.core.data.sampler import Remaining, SamplePlan
from steepest.core.engine.stores import OpaqueParts, Stores
from steepest.core.engine.topology import HostMap, Topology
from steepest.core.messages.fields import Limits
from steepest.core.messages.message import Peer
from steepest.core.messages.permissions import TRAINING, Line
from steepest.core.messages.schema import Body
from steepest.core.models.protocol import Model
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.protocol.commit_rules import (
    NO_NORM,
    CommitAll,
    knows_norms,
    leases_samples,
    pushes_per_update,
    stages_each,
)
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.core.transport.router import Role, Router
from steepest.errors import ConfigurationError, ModelError

#: The most servers that hold an opaque chunk, also if a strategy has copies of other chunks on all servers.
_OPAQUE_COPIES = 2

ModelCreator = Callable[[int, int], Model]


@dataclass(frozen=True)
class Description:
    """The traits of one worker's models and data, which must be the same on all workers."""

    layout: ParameterLayout
    optimizer_spec: OptimizerSpec
    samples: int | None  # of training data; None for streams
    batch_size: int  # samples of one batch
    # of the data, see `steepest.core.data.protocol.Blocks`; None if they have none
    blocks: Blocks | None = None
    threads: int = 1  # torch's in the process that described the models
    # whether replicas have values beside trained parameters that a model may change itself: buffers, frozen parameters
    changing: bool = False
    # for tests: called with each server and worker that is hosted in a process
    attend: Callable[[Router, Peer, Role], None] | None = None
    drop_last: bool = False  # of the data, see `SamplePlan`
    notice: str = ""  # what users should know of the data and the model, which the driver logs
    # what the models have beside the flat vector; None for nothing
    opaque: OpaqueParts | None = None
    # of the data, see `steepest.core.data.fingerprint`; worker 0's counts
    fingerprint: Fingerprint = field(default_factory=dict, hash=False)
    row_hashes: RowHashes = field(default_factory=dict, hash=False)
    # the greatest norm of a gradient, unless the strategy sets one
    clip_norm: float | None = None
    # whether the data divide a `global_batch_size` themselves
    divides: bool = False
    # whether an update is to be the sum over its samples instead of the mean
    sums: bool = False
    # how replicas' values of a buffer or frozen parameter are merged, by name: "mean" or "first", for those that the
    # model names; see `steepest.core.engine.replica_states.merged_states`
    merging: Mapping[str, str] = field(default_factory=dict, hash=False)
    # of data that are a window of a log, see `steepest.core.data.offset_stream`
    offsets: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Job:
    """The facts of one job, the same in every process.

    Raises:
        ConfigurationError: `global_batch_size` with data that choose their own batches; opaque
            chunks for which nothing is attached, or which the strategy cannot train.
    """

    description: Description
    config: Strategy  # the strategy as the user chose it
    num_workers: int
    devices_per_worker: int
    num_servers: int
    seed: int  # of initial weights, order of samples and random state
    step_timeout: float  # seconds within which a step must end
    keep_log: bool = False  # whether the coordinator keeps every commit, for a replay
    # where workers and servers run; by default each on a host of its own
    hosts: HostMap | None = None
    accumulate: int = 1  # micro-batches that each replica has at least for one gradient
    # where the learning-rate schedule stands at step 0, see `updates_before`
    schedule_offset: int = 0
    replaces: bool = False  # whether a lost worker is replaced, if that is possible
    # samples of one batch of all replicas together; None for as many as the models' batch size makes
    global_batch_size: int | None = None
    # names of parameters that are trained although models are made with them frozen
    unfrozen: frozenset[str] = frozenset()
    # the share of the steps in which each worker also computes another worker's samples, and whether a worker that
    # computes wrongly is replaced
    audit: float = 0.0
    audit_replaces: bool = False

    def __post_init__(self) -> None:
        if self.global_batch_size is not None and self.description.samples is None:
            raise ConfigurationError(
                f"global_batch_size={self.global_batch_size} with data that choose their own "
                "batches: their samples cannot be divided; give arrays, a map-style dataset or an "
                "IndexedStream, or leave global_batch_size out"
            )
        strategy = self.strategy  # refuses settings that the models' `clip_norm` excludes
        if strategy.delay and self.description.samples is None:
            raise ConfigurationError(
                f"delay={strategy.delay} with data that choose their own batches: a step that is taken again "
                "would need those of the step before, too; give arrays, a map-style dataset or an "
                "IndexedStream, or leave delay out"
            )
        opaque, spec = self.description.opaque, self.description.optimizer_spec
        if opaque is not None:
            opaque.require(strategy, spec)
        elif self.description.layout.opaque_chunks:
            raise ConfigurationError(
                "the model has opaque chunks in its layout, and nothing is attached that knows what they "
                "stand for: give build_models() an extension that does"
            )
        self._require_norms()
        if self.audit:
            self._require_auditable()
        if strategy.scale_rate and any(
            group.get("lr") is None for _, group in self.server_spec.groups
        ):
            raise ConfigurationError(
                f"strategy {self.config.name!r} divides learning rates by the staleness, and {self.server_spec.name} "
                "has a parameter group without one ('lr'): give an optimizer with learning rates, or leave "
                'correction="learning_rate" out'
            )
        self._require_form(strategy.codec)
        if strategy.reduces:
            self._require_plain_sums()

    def _require_norms(self) -> None:
        """Check that the norm by which updates are clipped is known; ConfigurationError otherwise."""
        rule, greatest = self.strategy.rule, self.strategy.clips_updates
        if greatest is not None and not knows_norms(rule, self.num_workers):
            raise ConfigurationError(
                NO_NORM.format(f"clip_norm={greatest} with rule {type(rule).__name__}")
            )

    def _require_auditable(self) -> None:
        """Check that a worker can compute another one's gradient; ConfigurationError otherwise."""
        strategy, reason = self.strategy, ""
        if strategy.local or not self.needs_all:
            reason = f"strategy {self.config.name!r}, whose workers do not take each step together from the same "
            reason += 'weights: give strategy="ps" or "allreduce"'
        elif self.description.samples is None or self.description.divides:
            reason = "data that choose their own batches, which no other worker can read: give arrays, a map-style "
            reason += "dataset or an IndexedStream"
        elif self.description.opaque is not None:
            reason = "embedding tables, whose rows only the worker asks for that needs them: train without tables"
        if reason:
            raise ConfigurationError(f"audit={self.audit} with {reason}, or leave audit= out")

    def _require_plain_sums(self) -> None:
        """Check that workers can add up gradients among themselves; ConfigurationError otherwise."""
        strategy, reason = self.strategy, ""
        if strategy.codec is not None:
            reason = f"its codec {type(strategy.codec).__name__} is for what servers add up"
        elif not isinstance(strategy.rule, CommitAll):
            reason = (
                f"its rule {type(strategy.rule).__name__} takes gradients that not all workers have"
            )
        if reason:
            raise ConfigurationError(
                f"strategy {self.config.name!r} has workers add up gradients among themselves, and {reason}: leave "
                "data_plane= out"
            )

    def _require_form(self, codec: Codec | None) -> None:
        """Check that a codec that is part of the method has a form for all gradients; ConfigurationError otherwise."""
        if codec is None or not codec.everywhere:
            return
        layout = self.description.layout
        for chunk in (layout.chunks[index] for index in layout.trainable_chunks):
            if chunk.slices and (
                chunk.dtype is not torch.float32 or codec.size(layout, chunk) is None
            ):
                entry = layout.entries[chunk.slices[0].entry]
                raise ConfigurationError(
                    f"{type(codec).__name__} of strategy {self.config.name!r} has no form for "
                    f"{entry.name!r} of dtype {chunk.dtype}: codecs are of float32 gradients, and one "
                    "with everywhere=True needs a size for each; train the model in float32"
                )

    @property
    def clip_norm(self) -> float | None:
        """The greatest norm of a gradient: the strategy's, or else the models' own."""
        own = self.config.clip_norm
        return self.description.clip_norm if own is None else own

    @cached_property
    def strategy(self) -> Strategy:
        """The way of training."""
        return replace(self.config, clip_norm=self.clip_norm)

    @property
    def cut(self) -> ChunkSpec:
        """How models are cut into chunks, and which parameters are trained besides."""
        return replace(self.strategy.cut, unfrozen=self.unfrozen)

    @cached_property
    def server_spec(self) -> OptimizerSpec:
        """The optimizer that servers apply."""
        return self.strategy.server_optimizer(self.description.optimizer_spec)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The server that answers for each chunk."""
        dense = self.places.beside_workers if self.replication == 1 else None
        return self.description.layout.assign_servers(self.num_servers, dense)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The servers that hold each chunk: the one that answers for it, then those with copies."""
        hosts, count = self.places.servers, self.num_servers

        def rank(
            owner: int, other: int
        ) -> tuple[bool, int]:  # other hosts than the owner's come first
            return hosts[other] == hosts[owner] and other != owner, (other - owner) % count

        @cache
        def holders_of(owner: int, copies: int) -> tuple[int, ...]:
            others = (other for other in range(count) if other != owner)
            return owner, *nsmallest(copies - 1, others, key=lambda other: rank(owner, other))

        opaque = min(self.replication, _OPAQUE_COPIES)
        return tuple(
            holders_of(owner, opaque if chunk.is_opaque else self.replication)
            for chunk, owner in zip(self.description.layout.chunks, self.owners, strict=True)
        )

    @property
    def passes_weights(self) -> bool:
        """Whether workers pass on new weights among themselves: they add up gradients, and no server has all chunks."""
        return self.places.reduces and self.replication < self.num_servers

    @property
    def replication(self) -> int:
        """The number of servers that hold each chunk; 1 where one process has all of them."""
        return 1 if self.num_workers == 1 else min(self.strategy.copies, self.num_servers)

    @cached_property
    def places(self) -> HostMap:
        """The hosts of workers and servers, with aggregators where gradients may be added up."""
        reduces = self.strategy.reduces and self.num_workers > 1
        if self.hosts is None:
            if self.strategy.in_workers:
                each = tuple(range(self.num_workers)), tuple(range(self.num_servers))
                return HostMap(*each, reduces=reduces)
            return HostMap.apart(self.num_workers, self.num_servers)
        gathers = not self.stages_each and self.strategy.hierarchical and self.replication == 1
        if gathers and not reduces and self.strategy.pull_codec is None:
            return self.hosts
        return replace(self.hosts, gathers=False, reduces=reduces)

    @cached_property
    def topology(self) -> Topology:
        """The spread of the model over the job's processes."""
        return Topology(
            self.description.layout,
            self.holders,
            self.places,
            self.wire_formats,
            self.strategy.pull_codec if self.num_workers > 1 else None,
            self.stores,
        )

    @cached_property
    def stores(self) -> Stores | None:
        """The maker of the stores of the layout's opaque chunks; None without such chunks."""
        opaque = self.description.opaque
        return None if opaque is None else opaque.stores(self.description.layout, self.seed)

    @property
    def lines(self) -> Mapping[Line, type[Body]]:
        """The messages that its roles may send to each other."""
        opaque = self.description.opaque
        return TRAINING if opaque is None else {**TRAINING, **opaque.lines}

    @property
    def limits(self) -> Limits:
        """The numbers of workers, servers and chunks, which bound those in messages."""
        return Limits(self.num_workers, self.num_servers, len(self.description.layout.chunks))

    @property
    def servers_in_workers(self) -> bool:
        """Whether no process is a server only; a single worker always hosts its servers."""
        return self.strategy.in_workers or (self.num_workers == 1 and not self.strategy.in_driver)

    def stays_on_gpu(self, *, serves: bool) -> bool:
        """Return whether a worker's weights, gradient and optimizer state lie on its first model's GPU, if it has one.

        Args:
            serves: whether servers are hosted in the worker's process.
        """
        alone = serves and self.num_workers == 1 and self.strategy.in_place
        return self.strategy.reduces_on_gpus or (alone and self.wire_formats[0] is None)

    @property
    def workers_are_replaced(self) -> bool:
        """Whether a lost worker is replaced alone: its process held nothing that others need."""
        if self.strategy.local and self.needs_all:
            return False
        return self.replaces and not self.servers_in_workers

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.num_workers * self.devices_per_worker

    @property
    def shares(self) -> int:
        """The number of workers' gradients that make one step."""
        return self.strategy.rule.pushes_per_step(self.num_workers)

    @property
    def needs_all(self) -> bool:
        """Whether an update needs every worker, see `steepest.core.protocol.commit_rules`."""
        return self.strategy.rule.needs_all

    @property
    def leases_samples(self) -> bool:
        """Whether workers are given shares of the samples one by one; see `steepest.core.protocol.commit_rules`."""
        return leases_samples(self.strategy.rule)

    @property
    def stages_each(self) -> bool:
        """Whether servers keep each push by itself until it is chosen; see `steepest.core.protocol.commit_rules`."""
        return stages_each(self.strategy.rule)

    @property
    def pushes_per_update(self) -> int:
        """The number of workers' gradients that make one update."""
        return pushes_per_update(self.strategy.rule, self.num_workers)

    @property
    def sums_at_commit(self) -> bool:
        """Whether an update is turned into the sum over its samples at its commit: no worker knows them all before."""
        known = not self.stages_each or self.pushes_per_update == 1 or self.strategy.local
        return self.description.sums and not known

    @property
    def versions_per_step(self) -> int:
        """The number of updates that make one step."""
        return self.strategy.rule.versions_per_step(self.num_workers)

    def step_of(self, version: int) -> int:
        """Return the number of whole steps that the updates up to a version make."""
        return version // self.versions_per_step

    def version_of(self, step: int) -> int:
        """Return the number of updates that a number of steps make."""
        return step * self.versions_per_step

    @property
    def wire_formats(self) -> tuple[Codec | None, torch.dtype | None]:
        """The formats in which float32 chunks are pushed and pulled; a single worker uses none just to save bytes."""
        codec, pulled = self.strategy.wire_formats
        if self.num_workers > 1:
            return codec, pulled
        return (codec if codec is not None and codec.everywhere else None), None

    @property
    def compresses(self) -> bool:
        """Whether workers keep the errors of lossy compression as state."""
        codec = self.wire_formats[0]
        return codec is not None and codec.lossy

    @property
    def workers_have_state(self) -> bool:
        """Whether workers may have state that no server holds, see `WorkerState`."""
        opaque = self.description.opaque
        if opaque is not None and opaque.keeps_state(self.strategy):
            return True
        return self.description.changing or self.compresses or self.strategy.local

    @property
    def global_batch(self) -> int:
        """The number of samples in one step."""
        if self.global_batch_size is not None:
            return self.global_batch_size * self.strategy.updates
        return self.parts * self.description.batch_size

    @property
    def micro_batches(self) -> int:
        """The number of batches that each replica computes for one gradient.

        It is more than `accumulate` if a batch would otherwise exceed the models' batch size.
        """
        size, replicas = self.global_batch_size or 0, self.shares * self.devices_per_worker
        return max(self.accumulate, -(-size // (replicas * self.description.batch_size)))

    @property
    def parts(self) -> int:
        """The number of batches in one step."""
        of_share = self.micro_batches * self.strategy.updates_of_share
        return self.shares * self.devices_per_worker * of_share

    def updates_before(self, step: int) -> int:
        """Return the number of updates of each weight before a step, which the schedule counts."""
        return step * self.strategy.updates + self.schedule_offset

    def plan(
        self, step: int = 0, remaining: Remaining | None = None, seed: int | None = None
    ) -> SamplePlan | None:
        """Return the plan of which worker gets which samples; None when the data are streams.

        Args:
            step: the first one of the plan.
            remaining: samples of begun epochs that are still to come; None for none.
            seed: of the order of samples; by default the job's.
        """
        samples, rest = self.description.samples, remaining or Remaining()
        if samples is None:
            return None
        seed = self.seed if seed is None else seed
        blocks = self.description.blocks
        begun = tuple(each for each in rest.begun if each[1] != blocks)
        return SamplePlan(
            samples,
            self.global_batch,
            seed,
            step,
            rest.epoch,
            rest.offset,
            blocks,
            rest.left,
            begun,
            self.description.drop_last,
        )


def _difference_of_opaque(first: OpaqueParts | None, other: OpaqueParts | None) -> str | None:
    """Return in words how two replicas' opaque parts differ, or None if they agree."""
    if first is None or other is None:
        return None  # if one has some, the layouts differ
    return first.difference(other)


#: Returns hashes of some samples of the first replicas' data and of the others', given the number of samples and some
#: indices, see `steepest.core.data.fingerprint.sample_hashes`.
ReadSamples = Callable[[int, list[int]], Sequence[list[str] | None]]


def without_caches(first: Description, other: Description, read: ReadSamples) -> Description:
    """Return the first description without the arrays that differ from another's although samples are the same.

    A data set may have arrays that it fills as its samples are read, with arbitrary values before. Samples, which may
    be slow to read, are read only if arrays differ.
    """
    unlike = unlike_rows(first.row_hashes, other.row_hashes)
    lengths = {first.fingerprint[name][1][:1] for name in unlike}
    if not unlike or len(lengths) != 1 or () in lengths:
        return first
    ((length,),) = lengths
    mine, theirs = read(length, sorted({row for rows in unlike.values() for row in rows}))
    if mine is None or mine != theirs:
        return first
    arrays = {name: summary for name, summary in first.fingerprint.items() if name not in unlike}
    rows = {name: hashes for name, hashes in first.row_hashes.items() if name not in unlike}
    return replace(first, fingerprint=arrays, row_hashes=rows)


def check_agreement(
    first: Description, other: Description, first_name: str, other_name: str
) -> None:
    """Check that two replicas, named for the error, are alike; ModelError names what differs."""
    difference = _difference_of_opaque(first.opaque, other.opaque)
    difference = difference or first.layout.difference(other.layout)
    for what, a, b in (
        ("offsets", dict(first.offsets), dict(other.offsets)),
        ("batch size", first.batch_size, other.batch_size),
        ("number of samples", first.samples, other.samples),
        ("blocks of samples", first.blocks, other.blocks),
        ("drop_last", first.drop_last, other.drop_last),
        ("sums of samples", first.sums, other.sums),
        ("choice of buffers", dict(first.merging), dict(other.merging)),
        ("optimizer", first.optimizer_spec.name, other.optimizer_spec.name),
        (
            "parameter groups",
            first.optimizer_spec.fixed_groups,
            other.optimizer_spec.fixed_groups,
        ),
        ("rules of parameters", first.optimizer_spec.ruled, other.optimizer_spec.ruled),
    ):
        if difference is None and a != b:
            difference = f"{what} {a!s:.2000}, the other has {b!s:.2000}"
    if difference is not None:
        raise ModelError(
            f"replicas disagree: {first_name} has {difference} ({other_name}); model_creator must "
            "build the same "
            "model for every worker and device"
        )
    if unlike := unlike_rows(first.row_hashes, other.row_hashes):
        row, name = min((rows[0], name) for name, rows in unlike.items())
        raise ModelError(
            f"replicas disagree: sample {row} is another one in the data of {first_name} than in those of {other_name} "
            f"(row {row} of {name}). Workers read shares of the same data by their numbers: give all of them the "
            "same in the same order, with sorted(...) around what glob(), os.listdir() or a set gives, and all of it, "
            f"not a part for each. If {name} is no part of the samples, make it when the first of them is read"
        )
