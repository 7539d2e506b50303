"""The processes of which a job is put together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from steepest.config.strategies import StrategyConfig
from steepest.messages.message import Peer


@dataclass(frozen=True)
class Membership:
    """The processes of which a job is put together.

    Attributes:
        config: the strategy.
        num_workers: how many workers there are.
        keep: maps each surviving worker's new index to its old one.
        added: new processes: of workers, with their models built, or in place of dead servers.
        placement: seats of new workers, by index; the others get the first that are free.
        gone: dead processes, and servers whose successors are in `added`; the other servers take the
            numbers that are free, in order.
        unfrozen: see `Job.unfrozen`.
    """

    config: StrategyConfig
    num_workers: int
    keep: Mapping[int, int]
    added: Mapping[Peer, Any] = field(default_factory=dict)
    placement: Mapping[int, int] = field(default_factory=dict)
    gone: Collection[Peer] = ()
    unfrozen: frozenset[str] = frozenset()
