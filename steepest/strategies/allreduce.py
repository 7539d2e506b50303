"""Allreduce with all that the library attaches: formats of gradients and weights, tables read beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steepest.core.config.compression import Compression
from steepest.core.strategies import allreduce as dense
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.half_precision import WIRE_DTYPES
from steepest.errors import ConfigurationError
from steepest.strategies.formats import WithFormats
from steepest.validation import require_choice, require_count


@dataclass(frozen=True, kw_only=True)
class AllreduceStrategy(WithFormats, dense.AllreduceStrategy):
    """Allreduce without server processes: each worker sums and updates one slice of the weights.

    All workers then gather the updated slices.

    Attributes:
        sharded: False for a whole copy of the optimizer's state in every worker. Each of W workers
            then sends its gradient to every other worker, which sums them: W - 1 times the bytes of
            a gradient instead of 2 (W - 1) / W, and one hop instead of two. None for True, or for
            False where gradients are compressed or there is a `data_plane`.
        wire_dtype: "fp16" or "bf16" to send float32 gradients and new weights between hosts in half
            the bytes; a pair sets it for gradients and for weights. None sends them as they are.
            With `data_plane` it is for gradients alone, inside a host too, whose mean is added up in
            that dtype; a chunk that does not fit into fp16 is added up in float32.
        compression: `Int8`, `Int4`, `Int2`, `TopK` or `PowerSGD`, or "int8", "int4", "int2",
            "topk" or "powersgd" for their defaults. Where there is more than one host, every worker
            sends its gradient compressed to every other worker; what that leaves out is added to the
            worker's next gradient. Not together with `wire_dtype`.
        table_staleness: of embedding tables, as for `ParameterServerStrategy`.
        data_plane: "gloo" to have workers add up gradients in a process group of torch.distributed,
            made anew whenever the members change. Each keeps the whole state of the optimizer, as
            with ``sharded=False``, unless `sharded` is True: then a chunk is added up at the worker
            that updates it, and the new weights go to all others in the group. Rows of embedding
            tables go to their servers as without it. "nccl" for the same on GPUs, of which each
            worker has one for itself: weights, gradients and the optimizer's state lie there, and
            the host sees none of them but for copies and checkpoints. No GPU has run it yet. None
            for the library's own connections. Gloo and NCCL open ports of their own, which neither the job's token nor
            `tls` protects.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> AllreduceStrategy(wire_dtype="bf16").name
        'allreduce'
    """

    compression: Compression | str | None = None
    table_staleness: int | None = None
    data_plane: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table_staleness is not None:
            require_count("table_staleness", self.table_staleness, 0)
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

        require_choice("data_plane", self.data_plane, (None, "gloo", "nccl"))
        if self.data_plane is not None:
            self._check_data_plane()

    def _check_data_plane(self) -> None:
        """Check that no setting is for the library's own connections."""
        if self.compression is not None:
            raise ConfigurationError(
                f"data_plane={self.data_plane!r} with compression={self.compression!r}: gradients are added up as they "
                'are; give wire_dtype="bf16" or "fp16" for half the bytes, or leave data_plane out'
            )
        if self.is_sharded and super().pull_dtype is not None:
            raise ConfigurationError(
                f"data_plane={self.data_plane!r} with sharded=True and wire_dtype={self.wire_dtype!r}: new weights are "
                f"passed on as they are; give wire_dtype={(self.push_format, None)!r}, for gradients"
            )
        if self.transport not in ("wire", "tcp"):
            raise ConfigurationError(
                f"data_plane={self.data_plane!r} with transport={self.transport!r}: a process group has connections of "
                'its own; give transport="wire" or "tcp", for all else'
            )

    @property
    def codec(self) -> Codec | None:
        """See `WithFormats`; None with a `data_plane`, with which servers are pushed the sum."""
        return None if self.data_plane is not None else super().codec

    @property
    def pull_dtype(self) -> torch.dtype | None:
        """See `WithFormats`; None with a `data_plane`."""
        return None if self.data_plane is not None else super().pull_dtype

    @property
    def reduces_in(self) -> torch.dtype | None:
        """The dtype that `wire_dtype` chooses for gradients, with a `data_plane`."""
        how = self.push_format if self.data_plane is not None else None
        return WIRE_DTYPES[how] if isinstance(how, str) else None

    @property
    def reduces(self) -> bool:
        """Whether workers add gradients up among themselves: those with a `data_plane`."""
        return self.data_plane is not None

    @property
    def reduces_on_gpus(self) -> bool:
        """Whether workers add up gradients on their GPUs."""
        return self.data_plane == "nccl"

    @property
    def is_sharded(self) -> bool:
        """Whether each worker keeps a slice of the optimizer's state, rather than all of it."""
        whole = self.compression is not None or self.data_plane is not None
        return not whole if self.sharded is None else self.sharded
