"""The start and the end of Ray's processes on a Spark cluster, by `ray.util.spark`."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from steepest.errors import ConfigurationError, ResourcesError
from steepest.runtime.ray_private import active_ray_on_spark, forget_ray_on_spark
from steepest.runtime.signals import EXIT_STATUS

log = logging.getLogger(__name__)
HOOK = f"{__name__}.Hook"
_NODE = "ray.util.spark.start_ray_node"  # the process that Ray on Spark starts for each node
_END_SECONDS = 20.0  # that Ray's processes on this machine have to end by themselves
_LOOK_SECONDS = 0.1
_LONGEST_ROOT = 25  # characters: a socket's path has at most 107, of which Ray takes 82
_HEAD_MEMORY = 1 << 30  # bytes, for Ray's bookkeeping: nothing is computed on the head node


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Ray's worker nodes on Spark, each in a Spark task that lasts as long as the node."""

    count: int
    cpus: int  # of each, in Spark's and in Ray's count
    memory: int | None  # bytes for the tasks and actors of each; None for a share of the machine's
    object_store_memory: int  # bytes of each, and of the head node
    directory: str  # in which Ray's temporary files lie, on every machine
    environment: Mapping[str, str]  # variables of all of Ray's processes


class Hook:
    """The hook that Ray on Spark finds by RAY_ON_SPARK_START_HOOK, and asks for its settings."""

    # It is the only way of Ray on Spark to give variables to nodes after Spark has begun.

    environment: Mapping[str, str] = {}
    job_groups: list[str] = []
    ending = False

    def get_default_temp_root_dir(self) -> str:
        """Return the directory for temporary files, where none was given."""
        return tempfile.gettempdir()

    def on_ray_dashboard_created(self, port: int) -> None:
        """Do nothing: there is no dashboard."""

    def on_cluster_created(self, ray_cluster_handler: Any) -> None:
        """Do nothing: `setup_ray_cluster` returns when nodes have joined."""

    def on_spark_job_created(self, job_group_id: str) -> None:
        """Note the group of a Spark job that will hold a node, to cancel it in the end."""
        if self.ending:
            raise RuntimeError("Ray on Spark ends: no node starts any more")
        self.job_groups.append(job_group_id)

    def custom_environment_variables(self) -> dict[str, str]:
        """Return variables of Ray's processes; they travel to executors inside of Spark's tasks."""
        return dict(self.environment)


@contextlib.contextmanager
def started(session: Any, nodes: Nodes) -> Iterator[str]:
    """Run Ray on Spark for the length of a block, in which RAY_ADDRESS is its address.

    At the end, also after an error or Ctrl-C at any moment, the Spark jobs are cancelled, Ray's
    processes on this machine have ended, and their temporary files are removed.

    Args:
        session: pyspark's, whose context runs.
        nodes: of Ray.

    Yields:
        The address of Ray's control store, "host:port".

    Raises:
        ConfigurationError: the directory's name is too long, or it cannot be written to.
        ResourcesError: not all nodes have joined.
    """
    root = _make_root(nodes.directory)
    Hook.environment, Hook.job_groups, Hook.ending = nodes.environment, [], False
    with contextlib.ExitStack() as ending:  # the last one is called first, and each one in any case
        ending.enter_context(_ended_by_sigterm())
        ending.callback(shutil.rmtree, root, ignore_errors=True)
        ending.callback(_wait_for_nodes, root)
        ending.callback(_terminate, root)
        ending.callback(_cancel_jobs, session)
        ending.callback(_shut_down)
        yield _set_up(session, nodes, root)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit` for a block, where it would end the process at once."""
    # Ray's handlers, which come in the block, pass the signal on to the one that they have found.

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(EXIT_STATUS)

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _make_root(directory: str) -> str:
    """Return a new directory for the temporary files of one cluster."""
    try:
        root = tempfile.mkdtemp(prefix="s-", dir=directory)
    except OSError as error:
        raise ConfigurationError(
            f"directory={directory!r}: {error.strerror}; give a directory on this machine's disk that "
            "can be written to, such as '/tmp'"
        ) from None
    if len(root) > _LONGEST_ROOT:
        os.rmdir(root)
        longest = _LONGEST_ROOT - len(root) + len(directory)
        raise ConfigurationError(
            f"directory={directory!r} has {len(directory)} characters: give one of at most {longest}, "
            "such as '/tmp', since the paths of Ray's sockets cannot be longer"
        )
    return root


def _set_up(session: Any, nodes: Nodes, root: str) -> str:
    """Start Ray's nodes; return the address when all have joined."""
    import ray
    from ray.util.spark import setup_ray_cluster

    from steepest.runtime.connection import end_ray

    master = session.sparkContext.master
    resources = (
        {} if is_local(master) else {"num_cpus_worker_node": nodes.cpus, "num_gpus_worker_node": 0}
    )
    asked = f"{nodes.count} Ray nodes of {nodes.cpus} CPUs on Spark at {master}"
    try:
        address, _ = setup_ray_cluster(
            max_worker_nodes=nodes.count,
            memory_worker_node=nodes.memory,
            memory_head_node=_HEAD_MEMORY,
            object_store_memory_worker_node=nodes.object_store_memory,
            object_store_memory_head_node=nodes.object_store_memory,
            head_node_options={"include_dashboard": False},
            ray_temp_root_dir=root,
            **resources,
        )
        ray.init(address=address, log_to_driver=False)
        try:
            joined = sum(bool(node["Alive"]) for node in ray.nodes()) - 1  # without the head
        finally:
            end_ray()
    except Exception as error:  # Ray raises what it likes, a bare Exception where it starts slowly
        why = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ResourcesError(f"{asked} did not start: {why}") from error
    if joined < nodes.count:
        raise ResourcesError(
            f"{asked}: {joined} have joined. Does Spark have executors with so many free cores, and do "
            "executors reach this machine? Ask for fewer nodes, or give Spark more"
        )
    return str(address)


def is_local(master: str) -> bool:
    """Return whether Spark runs in the driver's process, without executors."""
    return master == "local" or master.startswith("local[")


def _shut_down() -> None:
    """Let Ray end the processes that it knows of."""
    from steepest.runtime.connection import end_ray

    Hook.ending = True
    end_ray()
    active = active_ray_on_spark()
    if active is None:
        return
    try:
        active.shutdown()
    except Exception as error:  # noqa: BLE001  # Spark may be gone, and raises what it likes
        log.debug("Ray on Spark did not end by itself: %s", error)
    finally:
        active.spark_job_server.server_close()
        forget_ray_on_spark()


def _cancel_jobs(session: Any) -> None:
    """Cancel the Spark jobs that hold nodes, if Spark still runs."""
    for group in Hook.job_groups:
        try:
            session.sparkContext.cancelJobGroup(group)
        except Exception as error:  # noqa: BLE001  # the context was stopped: then the jobs have ended
            log.debug("Spark job %s was not cancelled: %s", group, error)


def _terminate(root: str) -> None:
    """Send SIGTERM to the nodes of this machine, at which they remove their files."""
    for process in _processes(root, lambda command: _NODE in command):
        process.terminate()


def _wait_for_nodes(root: str) -> None:
    """Wait until all nodes of this machine have ended; kill what is left of them."""
    deadline = time.monotonic() + _END_SECONDS
    while _processes(root) or _is_locked(root):
        if time.monotonic() >= deadline:
            for process in _processes(root):
                log.warning("process %d of Ray had to be killed", process.pid)
                process.kill()
            return
        time.sleep(_LOOK_SECONDS)


def _processes(root: str, wanted: Callable[[list[str]], bool] = lambda command: True) -> list[Any]:
    """Return the processes of this machine that name this directory in their arguments."""
    import psutil  # of Ray

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if process.pid != os.getpid() and wanted(command) and any(root in a for a in command):
                processes.append(process)
    return processes


def _is_locked(root: str) -> bool:
    """Return whether a node of this machine still uses its directory, which it locks meanwhile."""
    for name in os.listdir(root):
        if name.endswith(".lock"):
            with open(os.path.join(root, name)) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False
