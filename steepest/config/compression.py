"""How gradients may be compressed: frozen settings, validated when made."""

from __future__ import annotations

from dataclasses import dataclass

from steepest.config.validation import is_finite_number, require_count
from steepest.errors import ConfigurationError


@dataclass(frozen=True)
class TopK:
    """Compression: of each chunk only the elements of greatest magnitude travel, in 4 bytes each.

    Attributes:
        ratio: of the elements that travel; 0.01 is 1 %, and a hundredth of the bytes.

    Raises:
        ConfigurationError: the ratio is not above 0 and at most 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not is_finite_number(self.ratio) or not 0 < self.ratio <= 1:
            raise ConfigurationError(f"TopK(ratio={self.ratio!r}): give a number above 0 and at most 1, such as 0.01")


@dataclass(frozen=True)
class Int8:
    """Compression: each element travels as one of 255 multiples of the scale of its block.

    Attributes:
        block: elements in a block.

    Raises:
        ConfigurationError: the block is no positive integer.
    """

    block: int = 256

    def __post_init__(self) -> None:
        require_count("Int8 block", self.block)


@dataclass(frozen=True)
class PowerSGD:
    """Compression: each parameter of two or more dimensions travels as a product of two thin matrices.

    A parameter is a matrix with its first dimension as rows. Where the factors would be as large as it, and for
    vectors, it travels as it is. Vogels et al. 2019, arXiv:1905.13727.

    Attributes:
        rank: of the product.

    Raises:
        ConfigurationError: the rank is no positive integer.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        require_count("PowerSGD rank", self.rank)


Compression = TopK | Int8 | PowerSGD


#: compression by the names that users may give
COMPRESSION_BY_NAME: dict[str, Compression] = {"topk": TopK(), "int8": Int8(), "powersgd": PowerSGD()}


WireDtype = str | Compression | None
