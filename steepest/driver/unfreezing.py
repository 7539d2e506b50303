"""Frozen parameters that a user's function has unfrozen, which are trained from the next step on."""

from __future__ import annotations

from steepest.driver.calls import Calls
from steepest.recovery.supervisor import Supervisor
from steepest.runtime import remote_functions
from steepest.runtime.launch import Cluster
from steepest.state.job_state import JobState


def train_unfrozen(cluster: Cluster, state: JobState, supervisor: Supervisor, calls: Calls) -> None:
    """Have the job train the frozen parameters that any replica has unfrozen.

    The job's processes get their roles anew, with weights, optimizer state and place in the data as
    they are. All replicas train such a parameter, from the mean of its values if a model has
    changed it itself.
    """
    if all(entry.trainable for entry in cluster.job.description.layout.entries):
        return
    found = cluster.workers.call(remote_functions.unfrozen, what="look what is trained")
    names = frozenset[str]().union(*found)
    if not names:
        return
    own = {name: value for name, value in state.mean_buffers().items() if name in names}
    if own:
        version = cluster.client.position.version
        calls.replacing(lambda: state.set_weights(own, version))
    cluster.unfrozen |= names
    supervisor.settle()
    calls.replacing(lambda: None)  # a copy, since older ones know nothing of it
