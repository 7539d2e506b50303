"""State by "parameter/key", rows of tables among it, as the records that servers hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from steepest.checkpoint.saved_rows import TABLES
from steepest.core.engine import optimizer_slices
from steepest.core.optim.portable import Record
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import CheckpointError


def disassemble(
    layout: ParameterLayout, state: Mapping[str, torch.Tensor], plain: Iterable[str]
) -> list[Record]:
    """Split whole tensors of state into the chunks' parts, see `optimizer_slices.disassemble`.

    Rows are named "tables/shard/key", with the number of a shard; a shard's arrays stay whole, and are not copied.

    Raises:
        CheckpointError: an unknown shard, or what the state of parameters raises.
    """
    records: list[Record] = []
    dense: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        shard, _, key = name.rpartition("/")
        if name.startswith(TABLES):
            records.append(_record(layout, shard, key, value))
        else:
            dense[name] = value
    return records + optimizer_slices.disassemble(layout, dense, plain)


def _record(layout: ParameterLayout, shard: str, key: str, value: torch.Tensor) -> Record:
    """Return a part of the state of a shard of tables; CheckpointError: there is no such shard."""
    number = int(shard.removeprefix(TABLES)) if shard.removeprefix(TABLES).isdigit() else -1
    if not 0 <= number < len(layout.opaque_chunks):
        raise CheckpointError(f"the checkpoint has rows of {shard!r}, which is not there")
    about = {"name": shard, "key": key, "start": 0, "stop": len(value), "plain": False}
    return layout.opaque_chunks[number], about, value
