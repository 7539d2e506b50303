"""In which form gradients and weights travel between hosts: half precision, compression."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steepest.core.config.compression import COMPRESSION_BY_NAME, Compression
from steepest.core.strategies.strategy import WireStrategy
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.half_precision import WIRE_DTYPES
from steepest.core.tensors.layout import ChunkSpec
from steepest.errors import ConfigurationError
from steepest.strategies.compression.codecs import make_codec
from steepest.validation import require_choice

_HALF_DTYPES = (None, "fp16", "bf16")
WireDtype = str | tuple[str | None, str | None] | None


@dataclass(frozen=True, kw_only=True)
class WithFormats(WireStrategy):
    """A strategy whose gradients and weights may be sent between hosts in fewer bytes.

    Attributes:
        wire_dtype: as of `steepest.ParameterServerStrategy`.
    """

    wire_dtype: WireDtype = None

    @property
    def compression(self) -> Compression | str | None:
        """How gradients are compressed; None for not at all."""
        return None

    def _check_wire(self) -> None:
        super()._check_wire()
        if isinstance(self.wire_dtype, tuple):
            if len(self.wire_dtype) != 2:
                raise ConfigurationError(
                    f"wire_dtype={self.wire_dtype}: give one, or a pair for pushes and for pulls"
                )
            require_choice("wire_dtype of pushes", self.wire_dtype[0], _HALF_DTYPES)
            require_choice("wire_dtype of pulls", self.wire_dtype[1], _HALF_DTYPES)
        else:
            require_choice("wire_dtype", self.wire_dtype, _HALF_DTYPES)
        if self.compression is None:
            return
        if not isinstance(self.compression, Compression):
            require_choice("compression", self.compression, (None, *COMPRESSION_BY_NAME))
        if isinstance(self.wire_dtype, tuple) and self.wire_dtype[0] is not None:
            raise ConfigurationError(
                f"wire_dtype={self.wire_dtype!r} with compression={self.compression!r}: pushes are "
                f"compressed; give wire_dtype={self.wire_dtype[1]!r}, for pulls"
            )

    @property
    def push_format(self) -> Compression | str | None:
        """How gradients are sent between hosts: compressed, "fp16", "bf16"; None for unchanged."""
        if isinstance(self.compression, str):
            return COMPRESSION_BY_NAME[self.compression]
        if self.compression is not None:
            return self.compression
        return self.wire_dtype[0] if isinstance(self.wire_dtype, tuple) else self.wire_dtype

    @property
    def cut(self) -> ChunkSpec:
        """Chunks of `chunk_bytes`, which hold whole tensors where these are compressed as matrices."""
        how = self.push_format
        whole = how is not None and not isinstance(how, str) and how.whole
        return ChunkSpec(self.chunk_bytes, whole=whole)

    @property
    def codec(self) -> Codec | None:
        """The format that `compression` or `wire_dtype` chooses."""
        return make_codec(self.push_format)

    @property
    def pull_dtype(self) -> torch.dtype | None:
        """The dtype that `wire_dtype` chooses for weights."""
        pull = self.wire_dtype[1] if isinstance(self.wire_dtype, tuple) else self.wire_dtype
        return None if pull is None else WIRE_DTYPES[pull]
