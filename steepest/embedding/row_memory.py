"""Memory for rows that travel, which processes of one host read where it lies."""

from __future__ import annotations

import sys

from steepest.core.tensors.allocator import Recycler
from steepest.core.tensors.shared_memory import SHARED_FROM, Reusable

#: Of this process. Blocks are never freed: a process that has mapped one keeps the mapping.
ROW_MEMORY = Recycler(Reusable(), least=SHARED_FROM, most=sys.maxsize, rounded=True)
