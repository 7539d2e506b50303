"""Compression of gradients between hosts: frozen settings, validated when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from steepest.validation import require_count, require_number


@dataclass(frozen=True)
class TopK:
    """Send only the elements of greatest magnitude of each chunk, in 4 bytes each.

    Attributes:
        ratio: share of the elements that is sent, above 0 and at most 1; 0.01 is 1 %, and a
            hundredth of the bytes.

    Raises:
        ConfigurationError: the ratio is out of range.
    """

    whole: ClassVar[bool] = False  # whether chunks hold whole tensors
    ratio: float = 0.01

    def __post_init__(self) -> None:
        require_number("TopK ratio", self.ratio, 0, 1, but=0)


@dataclass(frozen=True)
class _InBlocks:
    """Send each element as a small integer times the scale of its block."""

    whole: ClassVar[bool] = False
    block: int = 256

    def __post_init__(self) -> None:
        require_count(f"{type(self).__name__} block", self.block)


@dataclass(frozen=True)
class Int8(_InBlocks):
    """Send each element as one of 255 multiples of the scale of its block.

    Attributes:
        block: number of consecutive elements that share a scale.

    Raises:
        ConfigurationError: the block is no positive integer.
    """


@dataclass(frozen=True)
class Int4(_InBlocks):
    """Send each element as one of 15 multiples of the scale of its block, two elements in a byte.

    Attributes:
        block: number of consecutive elements that share a scale.

    Raises:
        ConfigurationError: the block is no positive integer.
    """


@dataclass(frozen=True)
class Int2(_InBlocks):
    """Send each element as -3, -1, 1 or 3 times the scale of its block, four elements in a byte.

    Attributes:
        block: number of consecutive elements that share a scale.

    Raises:
        ConfigurationError: the block is no positive integer.
    """


@dataclass(frozen=True)
class PowerSGD:
    """Send the gradient of each parameter as a product of two thin matrices.

    This holds for parameters of two or more dimensions.

    The gradient is taken as a matrix with the parameter's first dimension as rows. Vectors, and
    matrices that are no larger than their factors, are sent as they are. Vogels et al. 2019,
    arXiv:1905.13727.

    Attributes:
        rank: columns of the first factor, rows of the second.

    Raises:
        ConfigurationError: the rank is no positive integer.
    """

    whole: ClassVar[bool] = True
    rank: int = 4

    def __post_init__(self) -> None:
        require_count("PowerSGD rank", self.rank)


Compression = TopK | Int8 | Int4 | Int2 | PowerSGD


#: Each compression with its default settings, by its name.
COMPRESSION_BY_NAME: dict[str, Compression] = {
    "topk": TopK(),
    "int8": Int8(),
    "int4": Int4(),
    "int2": Int2(),
    "powersgd": PowerSGD(),
}
