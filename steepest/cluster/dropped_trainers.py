"""What becomes of a trainer that nobody has any more, and that was not shut down."""

from __future__ import annotations

import _thread
import logging
import os

from steepest.cluster.checkpoint_manager import CheckpointManager
from steepest.cluster.launch import Cluster

log = logging.getLogger(__name__)


def drop(cluster: Cluster, keeping: CheckpointManager, process: int) -> None:
    """Has its processes ended by a thread of its own: a garbage collection may come in the middle of anything.

    Args:
        process: that made the trainer; in a forked child nothing is done.
    """
    if os.getpid() == process:
        _thread.start_new_thread(_drop, (cluster, keeping))  # threading's own takes locks


def _drop(cluster: Cluster, keeping: CheckpointManager) -> None:
    log.warning(
        "%s was dropped without shutdown(): its processes are ended now, and what was trained "
        "since the last checkpoint is lost; call shutdown(), or write: with DistributedSGD(...) as "
        "sgd:",
        cluster.holder,
    )
    keeping.drop()
    cluster.shutdown(dropped=True)
