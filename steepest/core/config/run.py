"""How a job is run: frozen groups of settings, validated when made.

Environment variables are read and set here and in no other module, but for those that processes hand on whole.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from steepest.errors import ConfigurationError
from steepest.validation import (
    require_choice,
    require_count,
    require_instance,
    require_number,
    require_seconds,
)

#: What may run a job's processes.
RUNTIMES = ("auto", "ray", "processes")


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """What happens when a process dies or falls silent.

    Attributes:
        max_failures: deaths of each process that are answered by replacing it. A worker that dies
            more often is left out, if enough workers remain. A worker can be replaced where servers
            hold the weights; a process that holds weights, where there are copies of them (see
            `snapshot_every`). A worker whose own code raises twice with no version committed in
            between is not replaced. 0 ends the step with an error instead.
        heartbeat: seconds without a sign of life after which a process is killed and replaced, where
            it can be. A process gives signs of life whenever Python code can run in it, and while
            it computes with Python's lock held; a long step is not silence.
        spares: idle processes kept ready to take a dead worker's place, which then takes tenths of
            a second instead of the seconds that Python and torch need to start; each holds a few
            hundred MB. None for one, started when the job has trained for 20 seconds; with GPUs
            there are none. A spare process of `steepest.run` also runs the function up to
            `prepare`, or up to its first call of `rank`, and holds the data that it has loaded
            there. It only imports the function's modules if that would leave less memory free
            than a worker takes.
        snapshot_every: updates after which the driver copies everything that a checkpoint holds
            into its memory, while training goes on, but for rows of tables with a directory, which go to
            disks of two processes; the first copy is of the state with which
            training begins, and another is taken when other weights are set or restored. When a
            process dies that held the only copy of something, all continue from the last snapshot,
            and a message says how many updates are made again. Where every worker contributes to
            each update they give the same bits again. None for as often as costs about one per cent
            of the time, at most four times in a second. With 0 there are no snapshots, and that death is
            an error. A strategy's `replication` loses nothing.
        patience: seconds that a step to which all workers contribute waits for a dead worker's
            successor, when no spare process is ready, before the other workers continue without it
            until the successor is there. A single worker is always waited for. `math.inf` keeps all
            workers in every step, and gives the bits of a run in which no process died, unless the
            dead worker took state of its own with it (see docs/explanation/deaths.md). With any other value
            than 0, servers wait for a dead server's successor too.

    Raises:
        ConfigurationError: a value is out of range.
    """

    max_failures: int = 3
    heartbeat: float = 2.0
    spares: int | None = None
    snapshot_every: int | None = None
    patience: float = 0.0

    def __post_init__(self) -> None:
        require_count("max_failures", self.max_failures, 0)
        require_seconds("heartbeat", self.heartbeat)
        if self.patience not in (0, math.inf):
            require_seconds("patience", self.patience)
        for name, lowest in (("spares", 0), ("snapshot_every", 0)):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), lowest)


@dataclass(frozen=True, kw_only=True)
class DeadlineConfig:
    """The longest waits, in seconds; each but the last ends with a `DeadlineError` that names the processes.

    Attributes:
        start: seconds until the cluster has placed all processes. Importing, building the model and
            connecting may take four times as long again.
        step: seconds until a step is committed.
        call: seconds until `evaluate`, `warmup` and the `foreach_` functions have their answers.
        driver: seconds without a word from the driver, until a process of the job ends by itself: the
            driver is cut off, or was stopped and never continued. A driver whose process runs sends
            word, also between calls of the trainer; that of a notebook may idle for days.

    Raises:
        ConfigurationError: a value is not a positive number, or over thirty years.
    """

    start: float = 30.0
    step: float = 300.0
    call: float = 3600.0
    driver: float = 600.0

    def __post_init__(self) -> None:
        for each in fields(self):
            require_seconds(f"DeadlineConfig {each.name}", getattr(self, each.name))


@dataclass(frozen=True, kw_only=True)
class ResourceConfig:
    """What a job takes of its cluster.

    Attributes:
        cpus_per_worker: CPUs that each worker reserves, and torch threads in it.
        serving_hosts: on how many nodes that have no worker servers run too, of the strategies that
            have server processes. A CPU of each is reserved. They hold their part of embedding
            tables; dense parameters only if there are too few servers for each node with workers to
            have one, or copies of each. With an elastic number of workers the job starts with the
            least, and its further workers leave these nodes out.
        keep_memory: whether a worker keeps the memory that a step frees for the next step instead
            of returning it to the kernel (where the C library is glibc). Large models on the CPU
            train up to twice as fast; a worker stays as large as its largest step was.

    Raises:
        ConfigurationError: a value is out of range.
    """

    cpus_per_worker: int = 1
    serving_hosts: int = 0
    keep_memory: bool = True

    def __post_init__(self) -> None:
        require_count("cpus_per_worker", self.cpus_per_worker)
        require_count("serving_hosts", self.serving_hosts, least=0)
        require_choice("keep_memory", self.keep_memory, (False, True))


@dataclass(frozen=True, kw_only=True)
class TLSConfig:
    """A certificate of the user's own, for connections between hosts.

    Every process of the job reads the three files, PEM, on its own node; no key travels. They may
    differ from node to node. Both ends of a connection demand a certificate that the authority has
    signed, for servers and clients alike; names and addresses in it are not looked at.

    Attributes:
        certificate: path of the certificate, followed by those between it and the authority's.
        key: path of its private key, not encrypted.
        ca: path of the authority's certificate.

    Raises:
        ConfigurationError: a value is no path.
    """

    certificate: str | Path
    key: str | Path
    ca: str | Path

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, (str, Path)) or not str(value):
                raise ConfigurationError(
                    f"TLSConfig {each.name}={value!r:.40}: give the path of a PEM file"
                )


def check_tls(value: object) -> None:
    """Check that a value is False, True or a `TLSConfig`, and goes with a transport.

    Args:
        value: as of `RunConfig.tls`.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(value, (bool, TLSConfig)):
        raise ConfigurationError(
            f"tls={value!r:.40}: give True for a certificate that the job makes, a TLSConfig for "
            "one of your own, or False"
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a job is run, apart from what it computes; the defaults suit most jobs.

    Attributes:
        failure: what happens when a process dies.
        deadlines: the longest waits.
        resources: what the job takes of its cluster.
        keep_log: whether the coordinator remembers every commit, for `DistributedSGD.log` and
            `steepest.testing.replay`; about 200 bytes for each push.
        history_rows: how many of its newest rows `DistributedSGD.history` keeps in the driver's
            memory, about 1 kB each.
        verbose: whether Ray's notices about itself are shown when the trainer starts Ray. Its
            errors are, and what it warns of later. A Ray that runs already is left as it is.
        tls: whether connections between hosts are encrypted, and their ends known by certificates
            (TLS 1.3); inside a host, over Unix-domain sockets, they are plain. True: by a
            certificate that the job makes for itself; needs the openssl command on the driver's
            host. A `TLSConfig`: by files of your own. Ray's channels are Ray's own matter, see
            `docs/howto/security.md`.
        page: whether the page of the job is served from its beginning, to this machine alone, at a free
            port, see `DistributedSGD.page`; a line of the log says how to open it.
        audit: the share of the steps, 0 to 1, in which each worker computes another worker's samples, too, and the
            gradients are compared before the step is committed: so much more is computed. Where they differ the
            step is computed again, to find out which process computes wrongly, and a warning and an event name it.
            See `docs/howto/audit.md`. 0 for no audits.
        audit_replaces: whether a worker that computes wrongly is replaced before the step is committed, and its
            node left out, if there is another one.
        runtime: what runs the job's processes. "auto": Ray where the program is connected to it, as in its tasks,
            actors and Tune's trials, or RAY_ADDRESS is set; else this machine. "processes": this machine, without
            Ray; workers may be more than there are cores. "ray": Ray, which is started if there is none.

    Raises:
        ConfigurationError: a value is of another type.

    Example:
        >>> config = RunConfig(failure=FailureConfig(spares=1), deadlines=DeadlineConfig(step=60))
        >>> config.deadlines.step
        60
    """

    failure: FailureConfig = field(default_factory=FailureConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    resources: ResourceConfig = field(default_factory=ResourceConfig)
    keep_log: bool = False
    history_rows: int = 100_000
    verbose: bool = False
    tls: bool | TLSConfig = False
    page: bool = False
    audit: float = 0.0
    audit_replaces: bool = False
    runtime: str = "auto"

    def __post_init__(self) -> None:
        require_instance("failure", self.failure, FailureConfig)
        require_instance("deadlines", self.deadlines, DeadlineConfig)
        require_instance("resources", self.resources, ResourceConfig)
        require_choice("keep_log", self.keep_log, (False, True))
        require_count("history_rows", self.history_rows)
        require_choice("verbose", self.verbose, (False, True))
        check_tls(self.tls)
        require_choice("page", self.page, (False, True))
        require_number("audit", self.audit, 0.0, 1.0)
        require_choice("audit_replaces", self.audit_replaces, (False, True))
        if self.audit_replaces and not (self.audit and self.failure.max_failures):
            raise ConfigurationError(
                f"audit_replaces=True with audit={self.audit} and max_failures={self.failure.max_failures}: no worker "
                "is replaced then; give audit= a share of the steps, and FailureConfig(max_failures=) at least 1"
            )
        require_choice("runtime", self.runtime, RUNTIMES)


def is_dumb_terminal() -> bool:
    """Return whether TERM says that the terminal cannot write over a line."""
    return os.environ.get("TERM") == "dumb"


def cluster_address() -> str | None:
    """Return the address of the Ray cluster that RAY_ADDRESS names, or None when it is not set."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_uses_tls() -> bool:
    """Return whether RAY_USE_TLS says that Ray's own connections are encrypted."""
    return os.environ.get("RAY_USE_TLS", "0").lower() not in ("", "0", "false")


def data_directory() -> Path | None:
    """Return the folder of data sets that STEEPEST_DATA names, or None when it is not set."""
    named = os.environ.get("STEEPEST_DATA")
    return Path(named) if named else None


def tell_frameworks_of_threads(threads: int) -> None:
    """Let JAX and TensorFlow, if they start later in this process, use a number of threads."""
    os.environ["PJRT_NPROC"] = str(threads)  # of XLA, for JAX
    for kind in ("INTRAOP", "INTEROP"):
        os.environ.setdefault(f"TF_NUM_{kind}_THREADS", str(threads))


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Return a context with some environment variables set; afterwards they are as before.

    Args:
        values: by name; None for a variable to be removed.
    """
    before = {name: os.environ.get(name) for name in values}
    try:
        set_environment(values)
        yield
    finally:
        set_environment(before)


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables of this process; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def environment_of_process() -> dict[str, str]:
    """Return the environment variables of this process."""
    return dict(os.environ)


def environment_variable(name: str) -> str | None:
    """Return an environment variable, or None if it is not set or empty."""
    return os.environ.get(name) or None
