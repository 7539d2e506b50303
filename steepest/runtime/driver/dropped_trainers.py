"""The end of a trainer that is garbage-collected without having been shut down."""

from __future__ import annotations

import logging
import os
from functools import partial

from steepest.core.system import system
from steepest.runtime.cluster import Cluster
from steepest.runtime.driver.checkpoint_manager import CheckpointManager

log = logging.getLogger(__name__)


def drop(cluster: Cluster, keeping: CheckpointManager, process: int) -> None:
    """End a trainer's processes, on a thread of its own, and log a warning.

    A garbage collection may come in the middle of any other work, so this does not wait.
    """
    if os.getpid() == process:
        system().begin(partial(_drop, cluster, keeping))


def _drop(cluster: Cluster, keeping: CheckpointManager) -> None:
    """End a trainer's processes; runs on a thread of its own."""
    log.warning(
        "%s was dropped without shutdown(): its processes are ended now, and what was trained "
        "since the last checkpoint is lost; call shutdown(), or write: with DistributedSGD(...) as "
        "sgd:",
        cluster.holder,
    )
    keeping.drop()
    cluster.shutdown(dropped=True)
