"""The seam by which other packages add to a job of dense models: `Extension`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from steepest.core.messages.message import Peer, Send
from steepest.core.models.protocol import Model
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ParameterLayout
from steepest.core.transport.router import Router

if TYPE_CHECKING:
    from steepest.core.engine.exchange import Compressor, Exchange
    from steepest.core.engine.job import Job
    from steepest.core.engine.replicas import Memory, Replicas, WorkShare
    from steepest.core.engine.stores import OpaqueParts


class Extension:
    """A way of training that the engine does not know; the builder of a job's roles passes it to `hosting`.

    Its methods are called when models are described and a worker's parts are made, on the router's thread. By default
    each leaves the job unchanged.
    """

    def opaque(self, model: Model) -> OpaqueParts | None:
        """Return a model's parts that are not in its flat vector, or None; see `OpaqueParts`."""
        return None

    def replicas(
        self,
        job: Job,
        share: WorkShare,
        models: Sequence[Model],
        devices: Sequence[torch.device],
        memory: Memory | None,
    ) -> Replicas | None:
        """Return replicas that compute in another way, or None for `Replicas`, whose arguments these are."""
        return None

    def compressor(
        self, layout: ParameterLayout, codec: Codec, packed: Sequence[bool]
    ) -> Compressor | None:
        """Return what packs a worker's gradients in a codec, or None; for arguments see `MakeCompressor`."""
        return None

    def route(self, job: Job, worker: int) -> Callable[[int], Peer] | None:
        """Return a function from a server to the peer that takes a worker's pushes for it; None for that server."""
        return None

    def exchange(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, send: Send
    ) -> Exchange:
        """Return an exchange that wraps a worker's, or that itself.

        Args:
            job: of the worker.
            worker: its index.
            replicas: its copies of the model.
            exchange: of the dense chunks, perhaps wrapped by others.
            send: sends as the worker.
        """
        return exchange

    def around(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, router: Router
    ) -> Exchange:
        """Return an exchange that wraps a worker's and moves gradients in threads of its own, or that itself.

        Args:
            job: of the worker.
            worker: its index.
            replicas: its copies of the model.
            exchange: the worker's, after `exchange` of all extensions.
            router: of the process; threads hand over their results with `Router.call`.
        """
        return exchange
