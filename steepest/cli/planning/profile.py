"""The measurements that a plan is made from: times, sizes and costs of a model on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from steepest.core.optim.spec import OptimizerSpec
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout


@dataclass(frozen=True)
class Costs:
    """Seconds of one processor for work beside the model's own computation.

    Attributes:
        message: to send, or to receive and handle, one message without its payload, of several in a row.
        alone: additional, for a message by itself: sent during a pass, or received by a process that slept. Its
            code and data have left the processor's caches by then.
        wake: until a process that slept begins with a message; no processor works meanwhile.
        sent, received: for each byte that is sent, or received, over TCP.
        added: for each byte of a gradient that a server adds up.
        applied: for each byte of weights in the optimizer's step.
        checked: for each byte of a gradient that is checked for NaN and infinity.
    """

    message: float = 0.0
    alone: float = 0.0
    wake: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    added: float = 0.0
    applied: float = 0.0
    checked: float = 0.0


@dataclass(frozen=True)
class CodecCosts:
    """Seconds to pack, and to unpack and add, for each byte of a gradient before it is packed."""

    packed: float = 0.0
    unpacked: float = 0.0


@dataclass(frozen=True)
class Profile:
    """A model as it was measured on one process, or as known from elsewhere.

    Attributes:
        samples: of one batch of a worker.
        seconds: of one forward and backward pass over such a batch.
        loading: seconds until a batch is loaded.
        ready: by parameter, after how many seconds its gradient is complete.
        layout: returns how the parameters lie in chunks, cut in a given way.
        spec: the model's optimizer.
        costs: of everything else.
        variation: of the seconds of a pass, as their standard deviation over their mean.
        codec_costs: returns the costs of a codec.
        holds_back: whether the last chunk for each server leaves at the end of the step only, as in a user's own
            loop, where gradients leave before it is certain that they are complete.
        own_loop: whether the loop is the user's own, which some settings of a strategy exclude.
        on_device: whether a device computes the passes, while the process' thread sends and receives.
        processor: processor seconds of a pass, on all threads; None: as many as the pass takes.
        load: processes of this machine that wanted a core before it was measured, on average over a minute.
    """

    samples: int
    seconds: float
    ready: Mapping[str, float]
    layout: Callable[[ChunkSpec], ParameterLayout]
    spec: OptimizerSpec
    loading: float = 0.0
    variation: float = 0.0
    costs: Costs = field(default_factory=Costs)
    codec_costs: Callable[[Codec], CodecCosts] = lambda codec: CodecCosts()
    holds_back: bool = False
    own_loop: bool = False
    on_device: bool = False
    processor: float | None = None
    load: float = 0.0

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the trained parameters."""
        layout = self.layout(ChunkSpec())
        return sum(layout.chunks[index].nbytes for index in layout.trainable_chunks)

    @property
    def occupied(self) -> float:
        """The processors that a pass keeps busy, on average: 0 if a device computes."""
        if self.on_device:
            return 0.0
        return 1.0 if self.processor is None else self.processor / max(self.seconds, 1e-9)

    @property
    def alone(self) -> float:
        """Seconds of a step of one process without any other: the batch, and the optimizer's step."""
        return self.seconds + self.loading + self.nbytes * self.costs.applied
