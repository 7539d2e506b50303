"""Parameter servers with the library's additions: compression, and tables read in advance."""

from __future__ import annotations

from dataclasses import dataclass

from steepest.core.config.compression import Compression
from steepest.core.strategies import parameter_server as dense
from steepest.errors import ConfigurationError
from steepest.strategies.formats import WithFormats
from steepest.validation import require_count


@dataclass(frozen=True, kw_only=True)
class ParameterServerStrategy(WithFormats, dense.ParameterServerStrategy):
    """Parameter server: servers hold the weights and apply the optimizer to what workers push.

    Attributes:
        wire_dtype: "fp16" or "bf16" to send float32 gradients and weights between hosts in half the
            bytes; servers add up, apply and keep them in float32. A pair sets it for pushes and for
            pulls: ``("fp16", None)``. A chunk that does not fit into fp16 is sent as float32.
        compression: `Int8`, `Int4`, `Int2`, `TopK` or `PowerSGD`, or "int8", "int4", "int2",
            "topk" or "powersgd" for their defaults. Each worker sends its own gradient compressed to
            servers of other hosts; what that leaves out is added to the worker's next gradient.
            `wire_dtype` is then that of the weights. Not together with backup workers or ``correction="drop"``.
        table_staleness: "sync" only, of embedding tables: how many of the last updates the rows
            with which a step computes may lack. With 1 they are asked for a step before they are
            needed, and come while that step computes. From 2 on they are asked for
            ``table_staleness - 1`` steps before, and their gradients travel while the next step
            computes, and are part of that one's update; a worker that dies loses those that it has
            not sent. With 0, and with None in "sync" without backup workers, the next step's rows are
            asked for when this one's gradient is sent, which changes no number. Which rows is found in
            the batch, see `steepest.TorchModel` (`table_ids`); those that are not found are asked for
            in the step. Not together with backup workers.

    Raises:
        ConfigurationError: a value is out of range, or two do not go together.
    """

    compression: Compression | str | None = None
    table_staleness: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table_staleness is not None:
            require_count("table_staleness", self.table_staleness, 0)
            if self.mode != "sync":
                raise ConfigurationError(
                    f"table_staleness={self.table_staleness} with mode={self.mode!r}: it is for "
                    "sync; with async and ssp rows are of any version since that of the weights"
                )
            if self.backup_workers:
                raise ConfigurationError(
                    f"table_staleness={self.table_staleness} with backup_workers="
                    f"{self.backup_workers}: which samples a worker computes next is not known "
                    "beforehand, and of a gradient that is dropped the rows would count; leave one "
                    "of them out"
                )
        if self.compression is not None and (self.backup_workers or self.correction == "drop"):
            raise ConfigurationError(
                f"compression={self.compression!r} with backup_workers={self.backup_workers} and "
                f"correction={self.correction!r}: of a gradient that is dropped nothing would be "
                "left for the next one"
            )
