"""Values and slots of rows as tensors of as few bytes as they have in memory, for checkpoints and copies.

An int8 row is its values, one byte each, and two bytes of their scale, a bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from steepest.errors import ConfigurationError

if TYPE_CHECKING:
    from steepest.tables.rows.kernels import Floats

_SCALE_BYTES = 2


def narrow(values: Floats, dtype: str) -> torch.Tensor:
    """Return numbers (n, columns) that a dtype of tables has, in that dtype: nothing is rounded."""
    if dtype != "int8":
        return torch.from_numpy(values).to(getattr(torch, dtype))
    from steepest.tables.rows.row_formats import RowFormat

    columns = values.shape[1]
    keys = np.zeros(len(values), np.int32), np.zeros(len(values), np.int64)
    salts = np.zeros(1, np.int64)
    sent = RowFormat(columns, 0, dtype).packed_values(values, keys, salts)
    packed = np.concatenate([sent[:, :columns], sent[:, -_SCALE_BYTES:]], axis=1)
    return torch.from_numpy(packed.view(np.int8))


def wide(value: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor of a state as an array; undo `narrow`.

    Raises:
        ConfigurationError: it is no such tensor.
    """
    if value.dtype in (torch.bfloat16, torch.float16):
        return value.float().numpy()
    if value.dtype is not torch.int8:
        return value.contiguous().numpy()
    if value.dim() != 2 or value.shape[1] <= _SCALE_BYTES:
        raise ConfigurationError(
            f"an array of int8 and shape {tuple(value.shape)} in a state of tables: give rows of values "
            "and the two bytes of their scale"
        )
    octets = value[:, -_SCALE_BYTES:].reshape(-1).clone()  # one row's may begin at an odd byte
    scales = octets.view(torch.bfloat16)[:, None].float()
    return (value[:, :-_SCALE_BYTES].float() * scales).numpy()
