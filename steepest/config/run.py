"""How processes are run: frozen, validated when made; the only reader of environment variables."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from steepest.config.validation import require_choice, require_count, require_seconds


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How processes are run; the defaults suit most.

    Attributes:
        cpus_per_worker: CPUs reserved for each worker, and torch threads in it.
        start_timeout: seconds within which the cluster must place all processes and these must be up.
        step_timeout: seconds after which a step that does not commit is given up with an error.
        call_timeout: seconds after which `evaluate`, `warmup` and the `foreach_` functions are.
        keep_log: have the coordinator remember every commit, for `DistributedSGD.log` and
            `steepest.testing.replay`; about 200 bytes for each push.
        keep_memory: have workers keep the memory that a step frees for the next one instead of giving it back to the
            kernel (where the C library is glibc), which makes large models on the CPU up to twice as fast; a worker
            then stays as large as its largest step was.

        max_failures: how often each process may die and be replaced; a worker that dies more often is left out, if
            enough are left. Workers can be replaced where the weights are not theirs, processes that hold weights where
            there are copies, see `snapshot_every`. One whose own code fails again, with no version committed since the
            one before it failed, is not replaced. 0 ends the step with an error instead.
        heartbeat: seconds after which a worker that gives no sign of life is killed and replaced, where it can be. A
            process gives one whenever Python code may run in it; a long step without it is no silence.
        spares: idle processes that are kept ready to take a dead worker's place, which takes them some tenths of a
            second instead of the seconds that Python and torch need to start; each holds a few hundred MB. By default
            one, as soon as the job has trained for 20 seconds. With GPUs there are none.
        snapshot_every: updates after which the driver copies weights and optimizer state into its memory, while
            training goes on. When a process dies that held what nobody else has, all go on from the last copy, and a
            message says how many updates are lost. None for no copies: then it is an error. With `replication` of a
            strategy nothing is lost.
        patience: seconds that the others wait in a step to which all contribute, when a worker has died and no spare
            process is ready, before they go on without it until its successor is there (but for a single one, which
            waits); infinity for a run in which every step has all workers, and the bits of one in which nobody died.
            With any, servers wait for another one in place of one that died, instead of doing without it meanwhile.

    Raises:
        ConfigurationError: a value out of range.
    """

    cpus_per_worker: int = 1
    start_timeout: float = 30.0
    step_timeout: float = 300.0
    call_timeout: float = 3600.0
    keep_log: bool = False
    keep_memory: bool = True
    max_failures: int = 3
    heartbeat: float = 3.0
    spares: int | None = None
    snapshot_every: int | None = None
    patience: float = 0.0

    def __post_init__(self) -> None:
        require_count("cpus_per_worker", self.cpus_per_worker)
        for name in ("start_timeout", "step_timeout", "call_timeout", "heartbeat"):
            require_seconds(name, getattr(self, name))
        if self.patience not in (0, math.inf):
            require_seconds("patience", self.patience)
        require_choice("keep_log", self.keep_log, (False, True))
        require_choice("keep_memory", self.keep_memory, (False, True))
        require_count("max_failures", self.max_failures, 0)
        for name, lowest in (("spares", 0), ("snapshot_every", 1)):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), lowest)


def cluster_address() -> str | None:
    """The running Ray cluster named by RAY_ADDRESS, or None when it is not set."""
    return os.environ.get("RAY_ADDRESS") or None


def data_directory() -> Path | None:
    """The folder of data sets named by STEEPEST_DATA, or None when it is not set."""
    named = os.environ.get("STEEPEST_DATA")
    return Path(named) if named else None
