"""A job's processes on Ray: actors in bundles of placement groups, see `JobRuntime`."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from steepest.runtime import places, ray_private
from steepest.runtime.connection import end_ray, ensure_ray
from steepest.runtime.job_runtime import (
    Call,
    CallError,
    CallRaisedError,
    Group,
    LateError,
    ProcessAwayError,
    ProcessDiedError,
    ResultLostError,
    UnreadableError,
)
from steepest.runtime.own_process import OwnProcess

_MARK_SECONDS = 2.0  # in which processes answer
_PRINTED_SECONDS = 5.0  # in which their output comes to the driver
log = logging.getLogger(__name__)
_LOG_SECONDS = 5.0
_NODE_LABEL = "ray.io/node-id"  # Ray gives it to each node


@functools.cache
def _actor_class(body: type) -> Any:
    """Return the Ray actor class of a body; made once, because Ray keeps each for ever."""
    return ray.remote(body)


#: What stands for an error of Ray's; the first class that it is of counts.
_ENDS: Sequence[tuple[type[BaseException], type[CallError]]] = (
    (ray.exceptions.GetTimeoutError, LateError),
    (ray.exceptions.ActorUnavailableError, ProcessAwayError),
    (ray.exceptions.RayActorError, ProcessDiedError),
    (ray.exceptions.ObjectLostError, ResultLostError),
    (ray.exceptions.RaySystemError, UnreadableError),
    (ray.exceptions.RayError, CallError),
)


def end_of_call(error: BaseException) -> BaseException:
    """Return our error for Ray's error of a call; other errors are returned unchanged."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return CallRaisedError(str(error), end_of_call(error.cause))
    return next((own(str(error)) for theirs, own in _ENDS if isinstance(error, theirs)), error)


@contextlib.contextmanager
def _ends() -> Iterator[None]:
    """Raise our error of a call in place of Ray's."""
    try:
        yield
    except ray.exceptions.RayError as error:
        raise end_of_call(error) from None


class RayCall(Call):
    """A reference of Ray's."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def done(self) -> bool:
        """Return whether Ray has its result."""
        return bool(ray.wait([self.ref], timeout=0)[0])

    def get(self, timeout: float | None = None) -> Any:
        """Return the result that Ray has."""
        with _ends():
            return ray.get(self.ref, timeout=timeout)

    def future(self) -> Future[Any]:
        """Return the future of the result, whose callbacks a thread of Ray's calls."""
        future: Future[Any] = self.ref.future()
        return future


def _sent(arguments: Sequence[Any]) -> list[Any]:
    return [each.ref if isinstance(each, RayCall) else each for each in arguments]


class RayRuntime(OwnProcess):
    """Ray, to which this process is connected or connects."""

    name, in_words = "ray", "this Ray"

    # -- the connection --------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether this process is connected."""
        return bool(ray.is_initialized())

    @property
    def job(self) -> str:
        """Ray's id of this process' job."""
        job: str = ray.get_runtime_context().get_job_id()
        return job

    def connect(self, cpus: int | None = None, *, verbose: bool = False) -> bool:
        """Connect, see `ensure_ray`, to a Ray that has all necessary API."""
        ray_private.check()
        began = ensure_ray(cpus, verbose=verbose)
        ray_private.show_repeated_lines()
        return began

    def shutdown(self) -> None:
        """Disconnect."""
        end_ray()

    def answers(self, seconds: float) -> bool:
        """Return whether Ray's control store (GCS) takes connections."""
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), seconds).close()
        except OSError:
            return False
        return True

    def leaves_sigterm(self, handler: object, status: int) -> bool:
        """Return whether the handler is that of Ray's drivers, which ends them with status 15."""
        if not ray_private.is_drivers_sigterm_handler(handler):
            return False
        ray_private.keep_exit_status(status)
        return True

    # -- processes -------------------------------------------------------------------------------

    def start(
        self, body: type, arguments: Sequence[Any], at: tuple[Group, int], **needs: float
    ) -> Any:
        """Start an actor."""
        group, bundle = at
        made = _actor_class(body).options(
            num_cpus=needs["cpus"],
            num_gpus=needs["gpus"],
            max_concurrency=needs["calls"],
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                _own(group), placement_group_bundle_index=bundle
            ),
        )
        return made.remote(*_sent(arguments))

    def call(self, process: Any, method: str, *arguments: Any) -> Call:
        """Call a method of an actor."""
        return RayCall(getattr(process, method).remote(*_sent(arguments)))

    def end(self, process: Any) -> None:
        """Kill an actor."""
        ray.kill(process, no_restart=True)

    def show_output(self, processes: Collection[Any]) -> None:
        """Wait for Ray's log monitor."""
        if (arrived := ray_private.printed_lines()) is None:
            return
        token = secrets.token_hex(8)
        refs = [process.mark_output.remote(token) for process in processes]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_MARK_SECONDS)
        marks = set[str]()
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # it is dead, and marks nothing
                marks.update(ray.get(ref))
        if not arrived.wait(marks, _PRINTED_SECONDS):
            log.warning(
                "what workers have printed last may be missing here: Ray has not sent it within %g s; "
                "it is in Ray's logs", _PRINTED_SECONDS,
            )  # fmt: skip

    def put(self, value: Any) -> Call:
        """Put a value into Ray's store."""
        return RayCall(ray.put(value))

    def get(self, calls: Collection[Call], timeout: float | None = None) -> list[Any]:
        """Return the results of calls."""
        with _ends():
            results: list[Any] = ray.get(_sent([*calls]), timeout=timeout)
        return results

    def wait(
        self, calls: Collection[Call], seconds: float | None, number: int | None = None
    ) -> list[Call]:
        """Wait for calls."""
        by_ref = dict(zip(_sent([*calls]), calls, strict=True))
        if not by_ref:
            return []
        number = len(by_ref) if number is None else number
        done, _ = ray.wait(list(by_ref), num_returns=number, timeout=seconds)
        return [by_ref[ref] for ref in done]

    # -- this process ------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """Ray's id of this node."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    @property
    def host(self) -> str:
        """The address of this node."""
        host: str = ray.util.get_node_ip_address()
        return host

    def name_process(self, name: str) -> None:
        """Show this process under a name, and none of Ray's tracebacks of what it cannot unpickle."""
        ray_private.hush_unreadable()
        ray_private.name_process(name)

    def last_lines(self, node: str, pid: int, logs: tuple[str, ...]) -> list[str]:
        """Return the last lines of a process' output, which its node reads."""
        if node == self.node:
            return places.last_lines(logs)
        affinity = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(places.last_lines)
        ref = task.options(scheduling_strategy=affinity).remote(logs)
        lines: list[str] = RayCall(ref).get(_LOG_SECONDS)
        return lines

    # -- nodes and room ------------------------------------------------------------------------------

    @property
    def may_grow(self) -> bool:
        """Whether nodes may join: not if this process has started Ray for itself."""
        return not ray_private.started_here()

    @property
    def shares(self) -> bool:
        """False: Ray counts CPUs."""
        return False

    def nodes(self) -> dict[str, Mapping[str, float]]:
        """Return the living nodes."""
        return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}

    def leaving_nodes(self) -> dict[str, float]:
        """Return the nodes that drain."""
        return ray_private.draining_nodes()

    def free_by_node(self) -> dict[str, dict[str, float]]:
        """Return the free resources of each node."""
        return ray_private.free_by_node()

    def total(self) -> dict[str, float]:
        """Return the resources of all nodes."""
        return dict(ray.cluster_resources())

    def free(self) -> dict[str, float]:
        """Return the free resources of all nodes."""
        return dict(ray.available_resources())

    def group_around(self) -> Group | None:
        """Return the group of a Ray Tune trial; a worker of Ray Train fills the bundle that it runs in."""
        group: Group | None = ray.util.get_current_placement_group()
        if group is None:
            return None
        captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
        return group if captures else None

    def ask(
        self,
        bundles: Sequence[dict[str, float]],
        how: str,
        without: Collection[str] = (),
        node: str | None = None,
    ) -> Group:
        """Ask for a placement group."""
        selector = {_NODE_LABEL: f"!in({','.join(sorted(without))})"}
        chosen: dict[str, Any] = {}
        if without:
            chosen["bundle_label_selector"] = [selector] * len(bundles)
        chosen |= {} if node is None else ray_private.wished_node(node)
        made: Group = placement_group(list(bundles), strategy=how, **chosen)
        return made

    def bundles(self, group: Group) -> dict[int, str]:
        """Return the node of each bundle."""
        nodes: dict[int, str] = placement_group_table(_own(group))["bundles_to_node_id"]
        return nodes

    def is_placed(self, group: Group) -> bool:
        """Return whether Ray has placed all bundles."""
        return bool(placement_group_table(_own(group)).get("state") == "CREATED")

    def give_back(self, group: Group) -> None:
        """Remove a placement group."""
        remove_placement_group(_own(group))

    def reserved(self, without: Collection[str]) -> list[dict[str, float]]:
        """Return the bundles of the placement groups that there are."""
        return [
            bundle
            for name, group in placement_group_table().items()
            if name not in without and group["state"] == "CREATED"
            for bundle in group["bundles"].values()
        ]


def _own(group: Group) -> PlacementGroup:
    assert isinstance(group, PlacementGroup)
    return group
