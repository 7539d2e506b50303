"""The Strategy protocol: one small object for each way of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from steepest.compression.codecs import Packer, Packing
from steepest.engine.topology import Hosts
from steepest.messages.message import Message, Peer, Send
from steepest.optim.spec import OptimizerSpec
from steepest.protocol.commit_rules import CommitRule
from steepest.tensors.layout import Cut, ParameterLayout


class Exchange(Protocol):
    """A worker's end of a strategy: takes gradients chunk by chunk, gives back new weights.

    One exchange lives as long as its worker. The worker calls `begin`, then `ready` for each chunk as
    the backward pass completes it, then `end`; messages that arrive meanwhile or afterwards go to
    `receive`, until it says that a version is complete.
    """

    packer: Packer  # with what compression has left out so far
    bytes_pushed: int  # in this step
    bytes_pulled: int  # of weights, so far

    def begin(self, generation: int, version: int, incarnation: int) -> None:
        """A step starts from the weights of `version`; which life of the worker takes it."""

    def ready(self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]) -> None:
        """A chunk of the gradient is complete (see `steepest.engine.replicas.ChunkReady`).

        `payload` stays unchanged until the step is committed.
        """

    def end(self) -> int:
        """The whole gradient is out; returns the push's sequence number."""

    def committed(self, sequence: int) -> None:
        """The push of that sequence number is part of the weights, where pushes are updates of their own."""

    @property
    def arriving(self) -> tuple[int, int]:
        """The newest (generation, version) of which any weights are here."""

    def has(self, entry: int | None, key: tuple[int, int]) -> bool:
        """Whether a trainable parameter (all of them, with None) is here at that (generation, version)."""

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Where an arriving payload goes."""

    def receive(self, source: Peer, message: Message) -> tuple[int, int] | None:
        """Takes a message; returns (generation, version) when the weights of that version are complete."""


class Strategy(Protocol):
    """A way of training."""

    #: how staged pushes become commits
    rule: CommitRule
    #: whether the driver itself is the only server, reached through Ray's object store
    in_driver: bool
    #: whether each worker's process is a server's too
    in_workers: bool
    #: how many servers hold each chunk; all, if there are fewer
    replication: int
    #: whether servers in a worker's process update the very weights that it computes with
    in_place: bool
    #: batches of each replica in a step with an update of its own weights after each; 1 for none
    updates: int
    #: whether what several workers of a host have in common leaves it and comes to it once
    hierarchical: bool
    #: how models are cut into chunks
    cut: Cut
    #: what becomes of an update with NaN or infinity: "refuse", "skip" or "pass"
    nonfinite: str
    #: the greatest norm of an update's gradient, or None for any
    clip_norm: float | None
    #: whether the learning rate is divided by the staleness
    scale_rate: bool
    #: how float32 chunks are pushed, and in which dtype they are pulled; None for as they are
    wire_formats: tuple[Packing | None, torch.dtype | None]

    def server_spec(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The optimizer that servers apply, where the user's is that."""

    def num_servers(self, nodes: int, workers: int) -> int:
        """How many servers to run for so many workers on so many nodes."""

    def exchange(
        self,
        worker: int,
        layout: ParameterLayout,
        holders: Sequence[Sequence[int]],
        weights: torch.Tensor,
        send: Send,
        hosts: Hosts,
        adopt: Callable[[torch.Tensor], bool] = lambda weights: False,
        *,
        alone: bool = False,
    ) -> Exchange:
        """A worker's end.

        Args:
            holders: the servers of each chunk; the first answers for it, the others have copies.
            weights: the flat vector that new weights are written to.
            hosts: where all workers and servers run.
            adopt: told of a flat vector that the workers of this host share; whether the models use it from now on.
            alone: whether it is the only worker, so that nothing travels.
        """
