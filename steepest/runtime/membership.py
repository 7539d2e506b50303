"""The processes of which a job is put together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from steepest.config.strategies import StrategyConfig
from steepest.messages.message import Peer


@dataclass(frozen=True)
class Membership:
    """The processes of which a job is put together."""

    config: StrategyConfig
    num_workers: int
    keep: Mapping[int, int]  # maps each surviving worker's new index to its old one
    #: New processes: of workers, with their models built, or in place of dead servers.
    added: Mapping[Peer, Any] = field(default_factory=dict)
    #: Seats of new workers, by index; the others get the first that are free.
    placement: Mapping[int, int] = field(default_factory=dict)
    #: Dead processes, and servers with successors in `added`; other servers take the free numbers.
    gone: Collection[Peer] = ()
    unfrozen: frozenset[str] = frozenset()
