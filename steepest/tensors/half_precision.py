"""Half precision on the wire: float32 chunks travel narrow; they are added up, applied and kept in float32."""

from __future__ import annotations

import torch

#: By the names that users give.
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FP16_MAX = 65504.0


def narrow_size(dtype: torch.dtype, nbytes: int, wire: torch.dtype | None) -> int | None:
    """Bytes of a chunk of that dtype and size when it is narrow; None when it travels as it is."""
    return nbytes // 2 if wire is not None and dtype is torch.float32 else None


def narrow(values: torch.Tensor, wire: torch.dtype, out: torch.Tensor) -> bool:
    """Rounds to the nearest.

    Args:
        values: flat bytes of float32.
        out: flat bytes, half as many.

    Returns:
        Whether all finite values stay finite: float16 ends at 65,504, and what does not fit must travel wide.

    Example:
        >>> out = torch.empty(2, dtype=torch.uint8)
        >>> narrow(torch.tensor([70000.0]).view(torch.uint8), torch.float16, out)
        False
        >>> narrow(torch.tensor([1.0]).view(torch.uint8), torch.float16, out), out.view(torch.float16).item()
        (True, 1.0)
    """
    full = values.view(torch.float32)
    out.view(wire).copy_(full)
    if wire is torch.float16:
        low, high = torch.aminmax(full)
        return not (float(low) < -_FP16_MAX or float(high) > _FP16_MAX)
    return True


def rounded(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """What arrives of a chunk (flat bytes of float32) that travels narrow: new flat bytes of float32."""
    half = torch.empty(values.numel() // 2, dtype=torch.uint8)
    return half.view(wire).float().view(torch.uint8) if narrow(values, wire, half) else values.clone()
