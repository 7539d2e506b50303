"""A job's processes on this machine, without Ray, see `JobRuntime`."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steepest.core.system import system
from steepest.errors import ResourcesError
from steepest.runtime.job_runtime import Call, Group, LateError
from steepest.runtime.machine.forked import ForkedProcess, ForkServer
from steepest.runtime.machine.notice import Notice
from steepest.runtime.machine.parcels import ParcelCall, packed
from steepest.runtime.own_process import OwnProcess
from steepest.runtime.signals import on_sigusr2

HOST = "127.0.0.1"
_NODE = "this machine"


@dataclass(eq=False)
class _GroupId:
    number: int

    def hex(self) -> str:
        return f"{self.number:x}"


@dataclass(eq=False)
class MachineGroup:
    """Room for some processes; CPUs are shared, and so are GPUs if there are too few.

    Attributes:
        id, bundle_specs: see `Group`.
        gpus: the numbers of the GPUs of each bundle; None while there are none.
        processes: that were started in it.
    """

    id: _GroupId
    bundle_specs: list[dict[str, float]]
    gpus: list[list[int]] | None = None
    processes: list[ForkedProcess] = field(default_factory=list)


class MachineRuntime(OwnProcess):
    """Processes of this machine: forks of a template, called through sockets that only the two ends have.

    Values are pickled; those of over a megabyte lie in shared memory, which receivers map. A process ends with the
    program that has started it.

    Args:
        show_name: in one of the processes, tells the program its name.
        notice: in one of the processes, the program's.
    """

    name, in_words = "processes", "this machine"
    node, host, may_grow, shares = _NODE, HOST, False, True

    def __init__(
        self,
        show_name: Callable[[str], object] = lambda name: None,
        notice: Notice | None = None,
    ) -> None:
        self._show_name = show_name
        self._notice = notice or Notice()
        self._template: ForkServer | None = None  # it stays until this program ends
        self._begun = 0  # how often it was connected
        self.is_up = False
        self._groups: dict[str, MachineGroup] = {}
        self._group_numbers = itertools.count(1)
        self._lock = threading.RLock()  # of the groups

    # -- the connection --------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """The number of the connection."""
        return str(self._begun)

    def connect(self, cpus: int | None = None, *, verbose: bool = False) -> bool:
        """Start a template, unless there is one."""
        if self.is_up:
            return False
        self.is_up, self._begun = True, self._begun + 1
        on_sigusr2(self._notice.give)
        self._living_template()
        return True

    def _living_template(self) -> ForkServer:
        if self._template is not None and self._template.is_over:
            self._template.end()  # else its number stays taken
            self._template = None
        if self._template is None:
            self._template = ForkServer(self._notice)
        return self._template

    def shutdown(self) -> None:
        """End all processes; the template stays, for those of later jobs."""
        self.is_up, self._groups = False, {}
        if self._template is not None:
            self._template.end_forks()

    def close(self) -> None:
        """End all processes, and the template; called once, as the last thing."""
        self.shutdown()
        if self._template is not None:
            self._template.end()
        self._notice.close()

    def answers(self, seconds: float) -> bool:
        """Return True: this program runs the processes."""
        return True

    def leaves_sigterm(self, handler: object, status: int) -> bool:
        """Return whether there is no handler, or one that Ray has left, to which this program was connected."""
        rays = str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"
        return rays or handler is signal.SIG_DFL

    # -- processes -------------------------------------------------------------------------------

    def start(
        self, body: type, arguments: Sequence[Any], at: tuple[Group, int], **needs: float
    ) -> Any:
        """Start a process."""
        group, bundle = at
        assert isinstance(group, MachineGroup)
        content = packed((body, tuple(arguments), int(needs["calls"])))
        environment = {}
        if needs["gpus"] and group.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, group.gpus[bundle]))
        process = self._living_template().fork(str(arguments[0]), environment)
        group.processes.append(process)
        process.make(content)
        return process

    def call(self, process: Any, method: str, *arguments: Any) -> Call:
        """Call a method of a process' body."""
        assert isinstance(process, ForkedProcess)
        return process.ask(packed((method, arguments)))

    def end(self, process: Any) -> None:
        """Kill a process."""
        assert isinstance(process, ForkedProcess)
        process.kill()

    def show_output(self, processes: Collection[Any]) -> None:
        """Wait until what they have printed is read."""
        for process in processes:
            process.output.join()

    def put(self, value: Any) -> Call:
        """Keep a value."""
        return ParcelCall.of(packed(value).closed())

    def get(self, calls: Collection[Call], timeout: float | None = None) -> list[Any]:
        """Return the results of calls; raise the first error as soon as there is one."""
        own = _own(calls)

        def is_over() -> bool:
            left = [call for call in own if not call.done()]
            return not left or any(call.parcel.exception(0) for call in own if call.done())

        if not _wait(own, timeout, is_over):
            raise LateError("the calls have not ended in time")
        for call in own:
            if call.done():
                call.parcel.result(0)
        return [call.get() for call in own]

    def wait(
        self, calls: Collection[Call], seconds: float | None, number: int | None = None
    ) -> list[Call]:
        """Wait for calls."""
        own = _own(calls)
        number = len(own) if number is None else number
        _wait(own, seconds, lambda: sum(call.done() for call in own) >= number)
        done: list[Call] = [call for call in own if call.done()]
        return done[:number]

    # -- this process ------------------------------------------------------------------------------

    def name_process(self, name: str) -> None:
        """Show this process under a name."""
        self._show_name(name)

    def last_lines(self, node: str, pid: int, logs: tuple[str, ...]) -> list[str]:
        """Return the last lines that a process has printed."""
        for group in list(self._groups.values()):
            for process in list(group.processes):
                if process.pid == pid:
                    process.output.join()
                    return list(process.output.lines)
        return []

    # -- nodes and room ------------------------------------------------------------------------------

    def nodes(self) -> dict[str, Mapping[str, float]]:
        """Return this machine."""
        return {_NODE: self.total()}

    def leaving_nodes(self) -> dict[str, float]:
        """Return this machine, at a time that is not known, once this program had SIGUSR2."""
        return {_NODE: 0.0} if self._notice.is_given else {}

    def free_by_node(self) -> dict[str, dict[str, float]]:
        """Return what no group has."""
        return {_NODE: self.free()}

    def total(self) -> dict[str, float]:
        """Return the cores and GPUs of this machine."""
        return {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(_gpus())}

    def free(self) -> dict[str, float]:
        """Return the cores and GPUs that no group has."""
        left = self.total()
        for bundle in self.reserved(()):
            for name, amount in bundle.items():
                left[name] = max(left.get(name, 0.0) - amount, 0.0)
        return left

    def group_around(self) -> Group | None:
        """Return None."""
        return None

    def ask(
        self,
        bundles: Sequence[dict[str, float]],
        how: str,
        without: Collection[str] = (),
        node: str | None = None,
    ) -> Group:
        """Return room for bundles; ResourcesError: not here."""
        if _NODE in without or (how == "STRICT_SPREAD" and len(bundles) > 1):
            raise ResourcesError(
                "all processes of runtime='processes' are on this machine: give runtime='ray' for others"
            )
        number = next(self._group_numbers)
        group = MachineGroup(_GroupId(number), [dict(bundle) for bundle in bundles])
        self._groups[group.id.hex()] = group
        self._place(group)
        return group

    def _place(self, group: MachineGroup) -> None:
        """Give each bundle of a group the GPUs that the fewest others have, if there are any."""
        with self._lock:
            needs = [int(bundle.get("GPU", 0)) for bundle in group.bundle_specs]
            count = _gpus() if any(needs) else 0
            if group.gpus is not None or max(needs) > count:
                return
            used = Counter(
                gpu for each in self._groups.values() for one in each.gpus or () for gpu in one
            )
            group.gpus = []
            for need in needs:
                rarest = sorted(range(count), key=lambda gpu: (used[gpu], gpu))[:need]
                used.update(rarest)
                group.gpus.append(rarest)

    def bundles(self, group: Group) -> dict[int, str]:
        """Return this machine for each bundle of a group that is placed."""
        where = _NODE if self.is_placed(group) else ""
        return dict.fromkeys(range(len(group.bundle_specs)), where)

    def is_placed(self, group: Group) -> bool:
        """Return whether a group has its GPUs."""
        assert isinstance(group, MachineGroup)
        self._place(group)
        return group.gpus is not None

    def give_back(self, group: Group) -> None:
        """Give a group's room back; its processes end."""
        assert isinstance(group, MachineGroup)
        self._groups.pop(group.id.hex(), None)
        for process in group.processes:
            process.kill()

    def reserved(self, without: Collection[str]) -> list[dict[str, float]]:
        """Return the bundles of groups."""
        groups = [group for name, group in list(self._groups.items()) if name not in without]
        return [bundle for each in groups if each.gpus is not None for bundle in each.bundle_specs]


def _gpus() -> int:
    """Return how many GPUs torch sees, of whichever kind, without starting to use one."""
    import torch

    return torch.accelerator.device_count()


def _own(calls: Collection[Call]) -> list[ParcelCall]:
    own = [call for call in calls if isinstance(call, ParcelCall)]
    assert len(own) == len(calls)
    return own


def _wait(calls: Sequence[ParcelCall], seconds: float | None, is_over: Callable[[], bool]) -> bool:
    """Return when enough of some calls have ended, or after some seconds; return whether they have."""
    if is_over():
        return True
    woken: queue.SimpleQueue[Any] = queue.SimpleQueue()
    until = None if seconds is None else system().now() + seconds
    for call in calls:
        if not call.done():
            call.parcel.add_done_callback(woken.put)
    try:
        while not is_over():
            left = None if until is None else until - system().now()
            if left is not None and left <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                woken.get(timeout=left)
        return True
    finally:
        for call in calls:
            call.parcel.remove_done_callback(woken.put)
