"""A connection to Ray."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import ray

from steepest.core.config.run import (
    cluster_address,
    environment,
    environment_variable,
    set_environment,
)
from steepest.core.transport.loopback import require_loopback
from steepest.errors import ConfigurationError, ResourcesError
from steepest.runtime.prefork.template import Template, start_template
from steepest.runtime.prefork.worker_start import TEMPLATE
from steepest.runtime.ray_folders import MODE, TOKENS, ray_folders
from steepest.runtime.ray_private import (
    end_with_ray,
    reload_token,
    small_ray,
    workers_start_as_usual,
)
from steepest.runtime.unbroken import unbroken

#: Milliseconds for which Ray keeps a process that it has started ahead while no CPU is free; by Ray's name.
_KEEPS_STARTED = "idle_worker_killing_time_threshold_ms", 30_000


def ensure_ray(
    num_cpus: int | None = None, *, verbose: bool = False, template: Template | None = None
) -> bool:
    """Connect to Ray unless this process is connected; return whether this call did.

    RAY_ADDRESS names a running cluster; without it a new one is started on this machine, see `start_ray`. If no Ray is
    started, `template` is ended.
    """
    is_up = ray.is_initialized()
    address = None if is_up else cluster_address()
    if template is not None and (is_up or address is not None):
        template.end()
    if is_up:
        return False
    if address is not None:
        connect(address)
    else:
        start_ray(num_cpus, verbose=verbose, template=template)
    return True


def connect(address: str) -> None:
    """Connect this process to a running cluster.

    Ray sends a token only if RAY_AUTH_MODE says so. If there is one in RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH, and RAY_AUTH_MODE is not set, it is therefore set to "token".

    Raises:
        ConfigurationError: the cluster does not let this process in, or is of another version.
    """
    named = [name for name in TOKENS if environment_variable(name)]
    mode = environment_variable(MODE)
    if named and not mode:
        mode = "token"
        set_environment({MODE: mode})
        reload_token()
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except ConnectionError as error:  # Ray says why on standard error only
        sent = (
            f"the token of {named[0] if named else 'the file .ray/auth_token in the home directory'}, "
            "is it the cluster's?"
            if mode == "token"
            else "no token"
        )
        raise ConfigurationError(
            f"could not connect to the Ray at {address}: {error}. A cluster that asks for a token lets in "
            f"who has it; this process has sent {sent} ({MODE} is {mode or 'not set'}): set "
            f"{MODE}=token, and the cluster's token as {' or '.join(TOKENS)}"
        ) from error
    except Exception as error:  # of another version, say
        raise ConfigurationError(
            f"could not connect to the Ray at {address}: {_words(error)}"
        ) from error


def start_ray(
    num_cpus: int | None = None, *, verbose: bool = False, template: Template | None = None
) -> None:
    """Start a cluster on this machine, with `num_cpus` at least, and connect to it.

    Its workers are forks of a template, which is started here unless one is given, and ends with Ray. From then on
    Ray asks for a token: one from the environment or the user's home, or a new one that Ray keeps there, or in
    `ray_folders`.

    Raises:
        ConfigurationError: this machine does not reach itself, or there is no room for Ray's files.
        ResourcesError: Ray does not start.
    """
    try:
        require_loopback()
        folders = ray_folders()
    except BaseException:
        if template is not None:
            template.end()
        raise
    if template is None and workers_start_as_usual():
        template = start_template()
    cpus = num_cpus if num_cpus is not None and (os.cpu_count() or 1) < num_cpus else None
    # "local": not the address that an earlier `ray start` on this machine left, which may be dead and
    # would be tried for minutes
    level = logging.WARNING if verbose else logging.ERROR
    # Ray starts a process for each CPU at once. A job reserves the CPUs before it starts its workers: by default Ray
    # would end these processes a second after that, and start others for the workers.
    name, value = _KEEPS_STARTED
    own = {} if environment_variable(f"RAY_{name}") else {name: value}
    variables = {TEMPLATE: template.name if template else None, **folders.variables}
    with small_ray(), environment(variables):
        if folders.variables:
            reload_token()
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                logging_level=level,
                _temp_dir=folders.directory,
                _system_config=own,
            )
        except BaseException as error:
            if template is not None:
                template.end()
            if isinstance(error, Exception):  # Ray raises a bare one where it starts slowly
                raise ResourcesError(
                    f"Ray did not start on this machine: {_words(error)} Try again when the machine is less busy, or "
                    'train without Ray: steepest run --runtime processes, RunConfig(runtime="processes")'
                ) from error
            raise
    if template is not None:
        end_with_ray("worker_template", template.process)
    logging.getLogger("ray").setLevel(logging.WARNING)  # what it warns of later is heard


def _words(error: Exception) -> str:
    """Return the message of an exception of Ray's in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def ray_session(num_cpus: int | None = None, template: Template | None = None) -> Iterator[None]:
    """Connect to Ray for the length of a block, see `ensure_ray`, and disconnect if the block connected."""
    began = ensure_ray(num_cpus, template=template)
    try:
        yield
    finally:
        if began:
            end_ray()


def end_ray() -> None:
    """Disconnect from Ray, and end the one that this process has started.

    Ray's own function, if interrupted, is called again at exit, and may end the process by SIGSEGV.
    """
    unbroken(ray.shutdown, "steepest ends Ray")


def describe_cluster() -> str:
    """Return version, nodes and free resources of the connected cluster, in a line."""
    free, total = ray.available_resources(), ray.cluster_resources()
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    shown = ", ".join(
        f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU")
    )
    return f"Ray {ray.__version__}, {nodes} nodes, free: {shown}"


def free_cpus() -> int:
    """Return the number of whole CPUs that are free now."""
    return int(ray.available_resources().get("CPU", 0))
