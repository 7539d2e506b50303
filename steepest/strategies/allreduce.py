"""Allreduce with all that the library attaches: formats of gradients and weights, tables read beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from steepest.config.compression import Compression
from steepest.core.strategies import allreduce as dense
from steepest.errors import ConfigurationError
from steepest.strategies.formats import WithFormats
from steepest.validation import require_count


@dataclass(frozen=True, kw_only=True)
class AllreduceStrategy(WithFormats, dense.AllreduceStrategy):
    """Allreduce without server processes: each worker sums and updates one slice of the weights.

    All workers then gather the updated slices. Settings that are not named here are those of
    `steepest.core.strategies.allreduce.AllreduceStrategy`.

    Attributes:
        sharded: as there; None for True, or False where gradients are compressed.
        wire_dtype: "fp16" or "bf16" to send float32 gradients and new weights between hosts in half
            the bytes; a pair sets it for gradients and for weights. None sends them as they are.
        compression: `Int8`, `Int4`, `Int2`, `TopK` or `PowerSGD`, or "int8", "int4", "int2",
            "topk" or "powersgd" for their
            defaults. Where there is more than one host, every worker sends its gradient compressed
            to every other worker; what that leaves out is added to the worker's next gradient. Not
            together with `wire_dtype`.
        table_staleness: of embedding tables, as for `ParameterServerStrategy`.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> AllreduceStrategy(wire_dtype="bf16").name
        'allreduce'
    """

    compression: Compression | str | None = None
    table_staleness: int | None = None

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

    @property
    def is_sharded(self) -> bool:
        """Whether each worker keeps a slice of the optimizer's state, rather than all of it."""
        return self.compression is None if self.sharded is None else self.sharded
