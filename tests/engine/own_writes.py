"""Models that write to their own parameters and buffers, and ways of training that must all give the same."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

WRITES = ("in place", "copy", "data", "storage")


class Momentum(nn.Module):
    """An encoder, and a second one that follows it in each forward pass, as in MoCo, BYOL and DINO.

    Args:
        how: what the update is written with.
    """

    def __init__(self, how: str, width: int = 4) -> None:
        super().__init__()
        self.how = how
        self.query, self.key = nn.Linear(3, width).double(), nn.Linear(3, width).double()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.steady = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    @torch.no_grad()
    def follow(self) -> None:
        for own, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
            if self.how == "in place":
                own.mul_(0.5).add_(new, alpha=0.5)
            elif self.how == "copy":
                own.copy_(own * 0.5 + new * 0.5)
            elif self.how == "data":
                own.data.mul_(0.5)
                own.data += new.data * 0.5
            else:  # as MoCo does it
                own.data = own.data * 0.5 + new.data * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        with torch.no_grad():
            target = self.key(x)
        return self.query(x) - target * self.steady.mean() - 1


def spectral(old: bool) -> nn.Module:
    layer = nn.Linear(3, 4).double()
    normed = (
        nn.utils.spectral_norm(layer) if old else nn.utils.parametrizations.spectral_norm(layer)
    )
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(4, 4).double())


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)).double()


#: by name: what makes the module
STATEFUL: dict[str, Callable[[], nn.Module]] = {
    **{f"momentum, {how}": functools.partial(Momentum, how) for how in WRITES},
    "spectral norm": functools.partial(spectral, True),
    "parametrized spectral norm": functools.partial(spectral, False),
    "batch norm": normalised,
}


class Writer(nn.Module):
    """Writes to its trained parameters where it is told to.

    Args:
        how: what with.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.writes = how, False
        self.first, self.last = nn.Linear(3, 5).double(), nn.Linear(5, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes and self.how == "clamp":
            with torch.no_grad():
                self.last.weight.clamp_(-0.01, 0.01)
        elif self.writes and self.how == "data":
            self.last.weight.data.mul_(0.5)
        elif self.writes and self.how == "storage":
            self.last.weight.data = self.last.weight.data * 0.5
        return self.last(torch.tanh(self.first(x)))


class Renormalised(nn.Module):
    """An embedding with max_norm, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last, self.writes = nn.Embedding(9, 5), nn.Linear(5, 4), False
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.max_norm = 0.5 if self.writes else None
        return self.last(self.table(x).mean(dim=1))


#: by name: what makes the module, and the parameter that it writes to
WRITERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        how: (functools.partial(Writer, how), "last.weight") for how in ("clamp", "data", "storage")
    },
    "max norm": (Renormalised, "table.weight"),
}


def trained(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.5
    )
