"""How a chunk of a worker's gradient is handed on when it is complete."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Called with a complete chunk of the worker's gradient: chunk index, its bytes, unit weight,
#: summed weight of the worker's samples, and the entries for which no replica had a gradient.
ChunkReady = Callable[[int, torch.Tensor, float, float, frozenset[int]], object]

#: The bytes of a chunk of which there is no gradient.
NOTHING = torch.empty(0, dtype=torch.uint8)
