"""What the user wants of a job's processes: asked for, granted when they are there, or refused."""

from __future__ import annotations

import logging
from dataclasses import replace

from steepest.core.strategies.strategy import Strategy
from steepest.errors import ResourcesError, SteepestError
from steepest.runtime.cluster import Cluster
from steepest.runtime.recovery.growth import Wanted
from steepest.runtime.recovery.observation import Observation

log = logging.getLogger(__name__)


class Wishes:
    """Keeps what the user wants of a job's processes."""

    def __init__(self, cluster: Cluster, observation: Observation) -> None:
        self._cluster = cluster
        self._observation = observation
        self._refused: SteepestError | None = None

    def want(self, config: Strategy, workers: int | None) -> None:
        """Ask for another strategy, or number of servers or workers."""
        self._cluster.check_ways(config)
        replace(self._cluster.job, config=config)  # raises where there can be no such job
        observation, self._refused = self._observation, None
        observation.wanted = wanted = observation.wanted.asking(config, workers)
        if not observation.dead():
            try:
                observation.start_missing()
            except ResourcesError as error:
                if not wanted.of_more:
                    self._take_back()
                    raise
                log.warning("%s", error)
                self._take_back_workers()  # the next look starts what else is missing

    def refuse(self, error: SteepestError) -> None:
        """Be content with the processes there are, because others cannot be had; see `are_granted`.

        If something else was asked for after another number of workers, which a callback did then,
        that number alone is taken back at first.
        """
        if self._observation.wanted.of_more:
            self._take_back_workers()
            return
        self._refused = error if self._observation.wanted.before is not None else None
        self._take_back()

    def _take_back(self) -> None:
        """Return to the earlier wish; a fixed number of workers becomes the number that there are."""
        observation, before = self._observation, self._observation.wanted.before
        observation.growth.cancel()
        if before is not None:
            most = self._cluster.job.num_workers if before.exact else before.most
            observation.wanted = replace(before, most=most)

    def _take_back_workers(self) -> None:
        """Do as `_take_back`, but keep the strategy that was asked for, which is still to come."""
        asked = self._observation.wanted
        self._take_back()
        wanted = self._observation.wanted
        self._observation.wanted = replace(wanted, config=asked.config, before=asked.before)

    @property
    def _is_granted(self) -> bool:
        wanted, job = self._observation.wanted, self._cluster.job
        # whoever asked for something else is not kept waiting by workers for which there is no room
        late = not wanted.of_workers and not self._observation.growth.awaits_successors
        enough = not wanted.exact or wanted.most == job.num_workers or late
        return wanted.config == job.config and enough

    def end_if_granted(self) -> None:
        """If the user has what was asked for, note that."""
        wanted = self._observation.wanted
        if wanted.before is not None and self._is_granted:
            self._observation.wanted = Wanted(
                wanted.config, wanted.least, wanted.most, wanted.exact
            )

    def are_granted(self, *, asked: bool) -> bool:
        """Return whether the user has everything that was asked for.

        Raises:
            SteepestError: what the caller has just `asked` for was refused for this reason.
        """
        self.end_if_granted()
        refused, self._refused = self._refused, None
        if refused is not None and asked:
            raise refused
        return self._observation.wanted.before is None
