"""What attaches to a job beside dense models, their push and their pull."""

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
    from steepest.core.engine.exchange import Exchange
    from steepest.core.engine.job import Job
    from steepest.core.engine.push_pull import Compressor
    from steepest.core.engine.replicas import Memory, Replicas, WorkShare
    from steepest.core.engine.stores import OpaqueParts


class Extension:
    """A way of training that the engine does not know; those who build a job's roles pass it to `hosting`.

    It is asked as models are described and a worker's parts are made, and answers for the jobs that concern
    it; by default for none. Used on the router's thread.
    """

    def opaque(self, model: Model) -> OpaqueParts | None:
        """Return what a model has beside the parameters of its flat vector, or None; see `OpaqueParts`."""
        return None

    def replicas(
        self,
        job: Job,
        share: WorkShare,
        models: Sequence[Model],
        devices: Sequence[torch.device],
        memory: Memory | None,
    ) -> Replicas | None:
        """Return replicas that compute in another way than `Replicas`, or None; arguments as those of `Replicas`."""
        return None

    def compressor(
        self, layout: ParameterLayout, codec: Codec, packed: Sequence[bool]
    ) -> Compressor | None:
        """Return what packs a worker's gradients in a codec, or None; arguments see `MakeCompressor`."""
        return None

    def route(self, job: Job, worker: int) -> Callable[[int], Peer] | None:
        """Return a function of who takes what a worker pushes to a server, or None: that server does."""
        return None

    def exchange(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, send: Send
    ) -> Exchange:
        """Return another exchange around a worker's, or that itself.

        Args:
            job: of the worker.
            worker: its index.
            replicas: its copies of the model.
            exchange: that of the dense chunks, perhaps with others around it.
            send: sends as the worker.
        """
        return exchange

    def around(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, router: Router
    ) -> Exchange:
        """Return another exchange around a worker's, one that moves gradients in threads of its own, or that itself.

        Args:
            job: of the worker.
            worker: its index.
            replicas: its copies of the model.
            exchange: with those of `exchange` of all extensions around it.
            router: of the process. What its threads have done they hand over with `Router.call`.
        """
        return exchange
