"""The Collective protocol: operations in which every current member takes part."""

from __future__ import annotations

from typing import Protocol

import torch


class Collective(Protocol):
    """Reductions and exchanges among the members of one generation.

    Every member calls the same operations in the same order. Inputs are never written to, so that an
    operation that fails can be tried again among other members. Sums are formed in the order of ranks,
    on every member alike, so that all of them hold the same bits. Tensors are one-dimensional, on the
    CPU or on the members' devices, of equal length and dtype everywhere.

    Every method raises `DeadlineError`, naming the members that are awaited, when it takes longer than the
    collective's deadline, and `PeerLostError` once a member is gone or the collective is aborted.
    """

    @property
    def rank(self) -> int:
        """This member's place, from 0."""

    @property
    def size(self) -> int:
        """Number of members."""

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum over members of this member's slice: `even_share(len(vector), rank, size)`."""

    def all_gather(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """The slices of all members, as cut by `even_share(length, rank, size)`, put together."""

    def broadcast(self, vector: torch.Tensor, root: int) -> torch.Tensor:
        """The root's vector."""

    def barrier(self) -> None:
        """Returns when every member has called it."""

    def abort(self, reason: str) -> None:
        """Ends every operation in progress, here and at the other members; there is no way back."""
