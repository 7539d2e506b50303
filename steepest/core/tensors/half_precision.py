"""Half precision: float32 chunks travel narrow, and all sums are formed in float32 or wider."""

from __future__ import annotations

import torch

#: Dtypes by the names that users give.
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FP16_MAX = 65504.0


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of a dtype are added up: float32 for narrower numbers, else their own.

    A sum of many bfloat16 numbers that is rounded after each stops growing, and one of float16 overflows although the
    mean does not.
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def narrow_size(dtype: torch.dtype, nbytes: int, wire: torch.dtype | None) -> int | None:
    """Return the size of a chunk in half precision; None if it travels unchanged (always without `wire`)."""
    return nbytes // 2 if wire is not None and dtype is torch.float32 else None


def narrow(values: torch.Tensor, wire: torch.dtype, out: torch.Tensor) -> bool:
    """Round float32 values to the nearest in half precision.

    Args:
        values: float32 as flat bytes, 4 n.
        wire: torch.float16 or torch.bfloat16.
        out: flat bytes, 2 n, overwritten.

    Returns:
        Whether all finite values stay finite. Float16 ends at 65,504; a chunk that does not fit
        must travel wide.

    Example:
        >>> out = torch.empty(2, dtype=torch.uint8)
        >>> narrow(torch.tensor([70000.0]).view(torch.uint8), torch.float16, out)
        False
        >>> narrow(torch.tensor([1.0]).view(torch.uint8), torch.float16, out)
        True
        >>> out.view(torch.float16).item()
        1.0
    """
    full = values.view(torch.float32)
    out.view(wire).copy_(full)
    if wire is torch.float16:
        low, high = torch.aminmax(full)
        return not (float(low) < -_FP16_MAX or float(high) > _FP16_MAX)
    return True


def rounded(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """Return, as new bytes, the values that the receiver of a narrow chunk gets: float32 as flat bytes, 4 n.

    They are `values` themselves if these do not fit into the dtype `wire`.
    """
    half = torch.empty(values.numel() // 2, dtype=torch.uint8)
    return (
        half.view(wire).float().view(torch.uint8) if narrow(values, wire, half) else values.clone()
    )
