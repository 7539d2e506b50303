"""All that the library attaches to the workers of the engine: who builds their roles passes it on."""

from __future__ import annotations

from collections.abc import Sequence

from steepest.core.engine.exchange import Compressor
from steepest.core.engine.extension import Extension
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ParameterLayout
from steepest.strategies.aggregation.extension import Aggregation
from steepest.strategies.compression.gradient_compressor import GradientCompressor
from steepest.strategies.local_sgd.extension import LocalSgd
from steepest.strategies.process_groups.extension import ProcessGroups
from steepest.tables.job.extension import EmbeddingTables


class Compression(Extension):
    """Error feedback, where the strategy has a codec."""

    def compressor(
        self, layout: ParameterLayout, codec: Codec, packed: Sequence[bool]
    ) -> Compressor | None:
        """Return a `GradientCompressor`."""
        return GradientCompressor(layout, codec, packed)


EXTENSIONS: tuple[Extension, ...] = (
    Compression(),
    LocalSgd(),
    Aggregation(),
    EmbeddingTables(),
    ProcessGroups(),
)
