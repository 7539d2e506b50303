"""All private API of Ray that steepest uses, looked up when it is first needed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ray

from steepest.core.config.run import environment_variable
from steepest.errors import ConfigurationError
from steepest.runtime.places import show_command
from steepest.runtime.prefork import worker_start
from steepest.runtime.prefork.template import TESTED
from steepest.runtime.worker_output import PrintedLines

log = logging.getLogger(__name__)
_LOGS, _REPEATED = "ray._private.ray_logging", "RAY_DEDUP_LOGS"
_PRINTS = "ray_print_logs"  # Ray's name of what prints workers' lines
_WISH = "_soft_target_node_id"


def _look_up(module: str, name: str) -> Any:
    """Return the object of a dotted name in one of Ray's private modules; ConfigurationError: there is none."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"Ray {ray.__version__} has no {module}.{name}, which steepest needs: install a "
            f"version of Ray that steepest is tested with, {TESTED}"
        ) from error


def check() -> None:
    """Raise ConfigurationError unless this Ray has the private API without which training cannot go on."""
    _look_up("ray._private.state", "state.get_draining_nodes")  # as Ray Train and Serve ask
    _look_up("ray._private.state", "state.available_resources_per_node")
    _look_up("ray._private.worker", "_global_node")


def draining_nodes() -> dict[str, float]:
    """Return the nodes that will leave the cluster, with deadlines of `time.time`; 0 for an unknown deadline."""
    stamps: dict[str, int] = _look_up("ray._private.state", "state.get_draining_nodes")()
    return {node: stamp / 1000.0 for node, stamp in stamps.items()}


def free_by_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each node of the cluster, by the node's id and Ray's names."""
    free: dict[str, dict[str, float]] = _look_up(
        "ray._private.state", "state.available_resources_per_node"
    )()
    return free


def wished_node(node: str) -> dict[str, str]:
    """Return the argument of `placement_group` that names the node where a group of one bundle is to be.

    Ray places it elsewhere if that node has no room, or dies. Without the private API the result is
    empty, and Ray spreads such groups over nodes.
    """
    return {_WISH: node} if _has_wishes() else {}


@functools.cache
def _has_wishes() -> bool:
    made = _look_up("ray.util.placement_group", "placement_group")
    return _WISH in inspect.signature(made).parameters


def started_here() -> bool:
    """Return whether this process has started the Ray that it uses for itself alone: no node will join that."""
    node = _look_up("ray._private.worker", "_global_node")
    return node is not None and bool(node.is_head())


@contextlib.contextmanager
def small_ray() -> Iterator[None]:
    """Let a Ray that is started in this context start without processes that are of no use to a job.

    Left out are the autoscaler, since no node joins a Ray that a process starts for itself, the dashboard,
    which sends usage statistics alone, and its agent where the packages that it serves with are not
    installed. Workers begin by `worker_start`, unless an environment is asked for. What
    Ray has no such private API for stays.
    """
    with contextlib.ExitStack() as stack:
        for module, name, value in _SMALLER:
            path, _, attribute = name.rpartition(".")
            try:
                own = _look_up(module, name)
                holder = _look_up(module, path) if path else importlib.import_module(module)
            except ConfigurationError as error:
                log.debug("Ray starts with a process more: %s", error)
                continue
            stack.callback(setattr, holder, attribute, own)
            setattr(holder, attribute, value(own))
        yield


def workers_start_as_usual() -> bool:
    """Return whether Ray's own program starts workers, and no replacement of it."""
    try:
        return bool(_look_up("ray._private.ray_constants", "SETUP_WORKER_FILENAME") == _SETUP)
    except ConfigurationError:
        return False


def end_with_ray(name: str, process: subprocess.Popen[bytes]) -> None:
    """Have a process end when the Ray ends that this process has started for itself.

    Without the private API nothing is done: the process has to end by itself.
    """
    try:
        node = _look_up("ray._private.worker", "_global_node")
        info = _look_up("ray._private.services", "ProcessInfo")
        node.all_processes[name] = [info(**{**dict.fromkeys(info._fields), "process": process})]
    except (ConfigurationError, AttributeError) as error:
        log.debug("Ray does not end the process %s: %s", name, error)


def _beside(name: str) -> str:
    """Return the path of a program beside this file."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)


def _agent_start(own: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return what makes the first arguments of a command of Ray's, which a program precedes in the agent's."""

    def start(component: str, *arguments: Any, **settings: Any) -> list[str]:
        command = own(component, *arguments, **settings)
        usual = [sys.executable, "-u"]  # no memory profiler
        return (
            [sys.executable, _beside("no_agent.py")]
            if (component, command) == (_AGENT, usual)
            else command
        )

    return start


def _worker_start(own: str) -> str:
    """Return the program that starts workers: one that somebody else has put in the place of Ray's stays."""
    return worker_start.__file__ if own == _SETUP else own


_AGENT = "dashboard_agent"
_SETUP = "setup_worker.py"
#: Modules of Ray, names in them, and what makes of a value the one that `small_ray` puts in its place.
_SMALLER: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("ray._private.node", "Node.start_monitor", lambda _: lambda node: None),
    ("ray._private.node", "Node.start_api_server", lambda _: lambda node, **settings: None),
    ("ray._private.services", "_build_python_executable_command_memory_profileable", _agent_start),
    ("ray._private.ray_constants", "SETUP_WORKER_FILENAME", _worker_start),
)


def printed_lines() -> PrintedLines | None:
    """Return the handler of lines that workers print; None if Ray shows none here, as with ``log_to_driver=False``.

    It takes the place of Ray's own handler of them, which it calls.
    """
    try:
        dispatcher = _look_up("ray._private.worker", "global_worker_stdstream_dispatcher")
        with dispatcher._lock:
            present = dict(dispatcher.handlers).get(_PRINTS)
            if present is None or isinstance(present, PrintedLines):
                return present
            arrived = PrintedLines(present)
            dispatcher.handlers = [
                (name, arrived if handler is present else handler)
                for name, handler in dispatcher.handlers
            ]
            return arrived
    except (ConfigurationError, AttributeError) as error:
        log.warning("what workers print last may not be shown: %s", error)
        return None


def show_repeated_lines() -> None:
    """Have Ray show each line that workers print, also what several print, unless RAY_DEDUP_LOGS asks for less."""
    if environment_variable(_REPEATED) is None:
        try:
            _look_up(_LOGS, _REPEATED)
        except ConfigurationError as error:
            log.warning("lines that several workers print may be shown once: %s", error)
            return
        setattr(importlib.import_module(_LOGS), _REPEATED, False)


def name_process(name: str) -> None:
    """Show this process, one of Ray's workers, under a name in `ps`, `top`, the dashboard and logs.

    The title keeps its prefix "ray::", by which `ray stop` and the dashboard know Ray's processes.
    `top` shows 15 characters, in which "steepest" is left out. Without the private API a warning is
    logged and nothing is renamed.
    """
    try:
        show = _title_setter()
        prefix = _look_up("ray._private.ray_constants", "LOG_PREFIX_ACTOR_NAME")
    except ConfigurationError as error:
        log.warning("processes have no names: %s", error)
        return
    show(f"ray::{name}")
    show_command(f"ray::{name.removeprefix('steepest ')}")
    for stream in (sys.stdout, sys.stderr):  # Ray's log monitor names the lines that follow
        stream.write(f"{prefix}{name}\n")
        stream.flush()


def is_drivers_sigterm_handler(handler: object) -> bool:
    """Return whether this is the handler that `ray.init` installs in a driver."""
    name = getattr(handler, "__qualname__", "")
    return getattr(handler, "__module__", "") == "ray._private.worker" and name.startswith("init.")


@functools.cache
def keep_exit_status(status: int) -> None:
    """Let the exit status of a signal's handler pass through Ray's calls.

    While the main thread waits in a call of Ray, Ray runs the handlers of signals, and for the
    `SystemExit` of one it raises another, whose status is 1. From now on it has this status if the
    handler's has. Without the private API a warning is logged and the status stays 1.
    """
    name = "raise_sys_exit_with_custom_error_message"
    try:
        raise_exit = _look_up("ray._raylet", name)
    except ConfigurationError as error:
        log.warning("SIGTERM may end this program with exit status 1: %s", error)
        return

    def raise_same(ray_terminate_msg: str, exit_code: int = 0) -> None:
        same = f"Exit code: {status}." in ray_terminate_msg  # of which Ray tells in words alone
        raise_exit(ray_terminate_msg, status if same else exit_code)

    setattr(importlib.import_module("ray._raylet"), name, raise_same)


def hush_unreadable() -> None:
    """Keep Ray from printing a traceback when this process cannot unpickle a value: the caller gets the error."""
    logging.getLogger("ray._private.serialization").setLevel(logging.CRITICAL)


@functools.cache
def _title_setter() -> Callable[[str], None]:
    """Return the function that sets this process' title; Ray would set it at each call, and no more does."""
    show: Callable[[str], None] = _look_up("ray._raylet", "setproctitle")
    importlib.import_module("ray._raylet").setproctitle = lambda title: None  # type: ignore[attr-defined]
    return show


def reload_token() -> None:
    """Let this process read RAY_AUTH_MODE and Ray's token anew; Ray reads them once, when it is imported."""
    _look_up("ray._raylet", "Config.initialize")("")
    _look_up("ray._raylet", "AuthenticationTokenLoader.instance")().reset_cache()


def active_ray_on_spark() -> Any:
    """Return the cluster that `ray.util.spark.setup_ray_cluster` has started here, or None."""
    return _look_up("ray.util.spark.cluster_init", "_active_ray_cluster")


def forget_ray_on_spark() -> None:
    """Let this process start another Ray on Spark, even if the end of the last one has failed."""
    importlib.import_module("ray.util.spark.cluster_init")._active_ray_cluster = None  # type: ignore[attr-defined]
