"""What becomes of a trainer that is garbage-collected without having been shut down."""

from __future__ import annotations

import _thread
import logging
import os

from steepest.driver.checkpoint_manager import CheckpointManager
from steepest.runtime.cluster import Cluster

log = logging.getLogger(__name__)


def drop(cluster: Cluster, keeping: CheckpointManager, process: int) -> None:
    """End a trainer's processes, on a thread of its own, and log a warning.

    A garbage collection may come in the middle of anything, so nothing is waited for here.
    """
    if os.getpid() == process:
        _thread.start_new_thread(_drop, (cluster, keeping))  # threading's own takes locks


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
