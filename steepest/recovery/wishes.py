"""What the user wants of a job's processes: asked for, granted when they are there, or refused."""

from __future__ import annotations

import logging
from dataclasses import replace

from steepest.config.strategies import StrategyConfig
from steepest.errors import ResourcesError, SteepestError
from steepest.recovery.observation import Observation, Wanted
from steepest.runtime.launch import Cluster

log = logging.getLogger(__name__)


class Wishes:
    """Changes what is wanted of a job's processes."""

    def __init__(self, cluster: Cluster, observation: Observation) -> None:
        self._cluster = cluster
        self._observation = observation
        self._before: Wanted | None = None  # what was wanted before the user asked for a change
        self._of_workers = False  # whether their number was asked for
        self._of_more = False  # whether something else was asked for after it
        self._refused: SteepestError | None = None

    def want(self, config: StrategyConfig, workers: int | None) -> None:
        """Ask for another strategy, or number of servers or workers."""
        self._cluster.check_ways(config)
        replace(self._cluster.job, config=config)  # raises where there can be no such job
        observation, before = self._observation, self._observation.wanted
        exactly = None if workers is None else Wanted.exactly(config, workers)
        observation.wanted = exactly or replace(before, config=config)
        self._before = self._before or before
        self._of_more = workers is None and self._of_workers
        self._of_workers = self._of_workers or workers is not None
        observation.growth.asked, self._refused = self._of_workers, None
        if not observation.dead():
            try:
                observation.start_missing()
            except ResourcesError as error:
                if not self._of_more:
                    self._take_back()
                    raise
                log.warning("%s", error)
                self._take_back_workers()  # the next look starts what else is missing

    def refuse(self, error: SteepestError) -> None:
        """Want what there is, because processes cannot be had; see `are_granted`.

        If something else was asked for after another number of workers, which a callback did then,
        that number alone is taken back at first.
        """
        if self._of_more:
            self._take_back_workers()
            return
        self._refused = error if self._before is not None else None
        self._take_back()

    def _take_back_workers(self) -> None:
        """Want the workers that were wanted before, or those that there are; what else was asked for stays."""
        observation, config = self._observation, self._observation.wanted.config
        observation.growth.cancel()
        observation.growth.asked, self._of_workers, self._of_more = False, False, False
        assert self._before is not None
        observation.wanted = replace(self._were_wanted(self._before), config=config)

    def _take_back(self) -> None:
        observation, before = self._observation, self._before
        observation.growth.cancel()
        observation.growth.asked, self._before, self._of_workers = False, None, False
        if before is not None:
            observation.wanted = self._were_wanted(before)

    def _were_wanted(self, before: Wanted) -> Wanted:
        """Return what was wanted before; of workers as many as there are, where the number is fixed."""
        most = self._cluster.job.num_workers if before.exact else before.most
        return replace(before, most=most)

    @property
    def _is_granted(self) -> bool:
        wanted, job = self._observation.wanted, self._cluster.job
        # whoever asked for something else is not kept waiting by workers for which there is no room
        late = not self._of_workers and not self._observation.growth.awaits_successors
        enough = not wanted.exact or wanted.most == job.num_workers or late
        return wanted.config == job.config and enough

    def end_if_granted(self) -> None:
        """Note that the user has what was asked for, if it is so."""
        if self._before is not None and self._is_granted:
            self._before, self._of_workers, self._of_more = None, False, False
            self._observation.growth.asked = False

    def are_granted(self, *, asked: bool) -> bool:
        """Return whether nothing is outstanding that the user has asked for."""
        self.end_if_granted()
        refused, self._refused = self._refused, None
        if refused is not None and asked:
            raise refused
        return self._before is None
