"""Users' calls of a job: each runs when the job is whole, and again if a process dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from steepest.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ShutdownError,
)
from steepest.runtime import remote_functions
from steepest.runtime.cluster import Cluster
from steepest.runtime.owner import Moment, Owner, owned
from steepest.runtime.recovery.supervisor import Supervisor
from steepest.runtime.state.transfer import StateTransfer

T = TypeVar("T")


class Calls:
    """Runs functions that read or replace a job's state; any thread may use it."""

    def __init__(self, cluster: Cluster, supervisor: Supervisor) -> None:
        self.owner: Owner = cluster.owner
        self._cluster = cluster
        self._supervisor = supervisor

    @owned(Moment.FREE)
    def once(self, function: Callable[[], T]) -> T:
        """Call a function once, when no process is dead, and return its result."""
        self._supervisor.await_whole()
        with self.owner.for_caller():
            return function()

    @owned(Moment.FREE)
    def surviving(self, function: Callable[[], T]) -> T:
        """Call a function, again whenever a process dies meanwhile, and return its result."""
        with self.owner.for_caller():
            return self._surviving(function)

    def _surviving(self, function: Callable[[], T]) -> T:
        """Do the same as `surviving`, and try once more after a loss without a death.

        Workers may hear only now of a change before the call, and then give up what they wait for.
        """
        without = 0  # deaths
        while True:
            self._supervisor.await_whole()
            before = self._supervisor.processes()
            try:
                return function()
            except (PeerLostError, DeadlineError) as error:
                if self._supervisor.has_died_since(before):
                    continue
                without += 1
                if without > 1 or isinstance(error, DeadlineError):
                    raise

    def surviving_here(self, collect: Callable[[], T], then: Callable[[T], object]) -> None:
        """Have the owner collect something, and do the rest on the calling thread.

        Both are done again if a process dies meanwhile.
        """
        supervisor = self._supervisor
        while True:
            before, result = self.surviving(lambda: (supervisor.processes(), collect()))
            try:
                then(result)
                return
            except (PeerLostError, DeadlineError, ShutdownError):
                self.owner.raise_ended()
                if not supervisor.has_died_since(before):
                    raise

    @owned(Moment.FREE)
    def replacing(self, function: Callable[[], object]) -> None:
        """Call a function that sets another state, and copy that state; repeat both if a process dies meanwhile.

        A change that has begun is completed, also if the caller does not wait for it any more.
        """
        supervisor = self._supervisor

        def whole() -> None:
            try:
                function()
            except (PeerLostError, DeadlineError, ConfigurationError, CheckpointError):
                raise  # the last copy serves to begin again, or nothing has changed
            except BaseException:
                supervisor.snapshots.forget()
                raise
            supervisor.promised = self._cluster.step
            if supervisor.snapshots.renew(self._cluster.meanwhile):
                return
            if self._cluster.client.lost_peer is not None or supervisor.observation.dead():
                raise PeerLostError("a process died before there was a copy of the state")
            supervisor.snapshots.forget()

        with self.owner.to_its_end():
            self._surviving(whole)

    def reading(self, function: Callable[[], T]) -> T:
        """Call a function that reads from the job, also during training, and return its result.

        It is called again if the job was reassembled after a death meanwhile.
        """
        supervisor = self._supervisor

        def read() -> list[T]:
            """Return the function's result in a list; an empty list if a process has died."""
            supervisor.raise_kept()
            before = supervisor.processes()
            try:
                return [function()]
            except (PeerLostError, DeadlineError, ShutdownError):
                self.owner.raise_ended()
                if not supervisor.has_died_since(before):
                    raise
                return []

        while True:
            if results := self.owner.call(read, Moment.WHOLE, supervisor.is_readable):
                return results[0]

    def train_unfrozen(self, state: StateTransfer) -> None:
        """Have the job train the frozen parameters that any replica has unfrozen.

        The job's processes get their roles anew, with weights, optimizer state and place in the
        data as they are. All replicas train such a parameter, from the mean of its values if a
        model has changed it itself.

        Raises:
            ModelError: the optimizer leaves out one of them.
        """
        cluster = self._cluster
        if all(entry.trainable for entry in cluster.job.description.layout.entries):
            return
        by_worker = cluster.workers.call(remote_functions.unfrozen, what="look what is trained")
        names = frozenset[str]().union(*by_worker)
        if not names:
            return
        own = {name: value for name, value in state.merged_buffers().items() if name in names}
        if own:
            version = cluster.client.position.version
            self.replacing(lambda: state.set_weights(own, version))
        cluster.unfrozen |= names
        self._supervisor.await_whole()
        self.replacing(
            lambda: None
        )  # takes a new copy of the state, since older ones lack these parameters
