"""How the rows of a replicated table are updated: by the table's optimizer, as its server would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from steepest.tables.rows.kernels import read_only
from steepest.tables.rows.replicated import put_back, take_touched
from steepest.tables.rows.table import Table


@dataclass(frozen=True)
class RowRule:
    """Updates the rows of a replicated table that have a gradient as its server would, to the bit.

    See `steepest.core.optim.rules.Rule`. A row of which all gradients are zeros counts as none of the batch's; modules
    see to it that none of a batch's rows is such where that makes a difference, see `TOUCHED`.
    """

    table: Table

    @property
    def lr(self) -> float:
        """The learning rate of the table's optimizer."""
        return self.table.optimizer.lr

    @property
    def follows(self) -> int | None:
        """The parameter group whose learning rate the table follows."""
        return self.table.optimizer.follows

    def prepare(self) -> None:
        """Compile what updates run."""
        values = torch.zeros(2, self.table.dim, dtype=getattr(torch, self.table.form.dtype))
        self.update(values, torch.ones_like(values), {}, 1.0)

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], factor: float
    ) -> None:
        """Update the rows that have a gradient; the state is "step", and "slots", (num_embeddings, k)."""
        optimizer, (count, dim) = self.table.optimizer, values.shape
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float64)
        if "slots" not in state and (first := optimizer.first_slots(dim)):
            state["slots"] = torch.tensor(first, dtype=values.dtype).repeat(count, 1)
        state["step"] += 1
        now = values.detach().cpu().numpy()
        slots = state["slots"].numpy() if "slots" in state else np.empty((count, 0), now.dtype)
        gradients, rate = read_only(gradient.cpu().numpy(), now.dtype), None
        if not optimizer.takes_rate() and factor != 1.0:
            gradients = read_only(gradients * gradients.dtype.type(factor), now.dtype)
        elif factor != 1.0:
            rate = optimizer.lr * factor
        if not optimizer.update_everywhere(now, slots, gradients, rate):
            numbers, mine = np.empty(count, np.int32), np.empty((count, dim), now.dtype)
            rows = np.empty((count, dim + slots.shape[1]), now.dtype)
            touched = take_touched(now, slots, gradients, numbers, rows, mine)
            rows, own = rows[:touched], read_only(mine[:touched], now.dtype)
            every = np.arange(touched, dtype=np.int32)
            optimizer.update(rows, every, own, int(state["step"]), rate)
            put_back(numbers[:touched], rows, now, slots)
        if values.device.type != "cpu":
            values.copy_(torch.from_numpy(now))
