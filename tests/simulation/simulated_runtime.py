"""A `JobRuntime` of simulated nodes and processes, on virtual time; its errors are Ray's."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from steepest.core.messages.message import Peer
from steepest.core.transport.channel import ChannelSink
from steepest.core.transport.encryption import Encryption
from steepest.runtime.job_runtime import Call, Group, LateError
from steepest.runtime.places import last_lines
from tests.simulation.simulated_actors import Actor, Handle
from tests.simulation.simulated_channels import SimulatedTransport
from tests.simulation.simulated_objects import Ref, Store
from tests.simulation.simulated_placement import Places
from tests.simulation.simulated_processes import World
from tests.simulation.virtual_primitives import EPOCH
from tests.simulation.virtual_threads import Waiters

_CALL_SECONDS = 2e-4  # that `get` and `wait` take at least


class SimulatedRuntime:
    """Where a simulation's jobs run.

    Attributes:
        places: groups of bundles, and actors.
        store: objects.
        notices: the nodes that will go, and when, by `World`'s clock; 0 for one that is not known.
        may_grow: whether nodes may join.
    """

    name, in_words = "simulation", "this simulation"
    owns_process = False
    shares = False
    job = "01"

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = Store(world.scheduler)
        self.places = Places(world, self.store)
        self.notices: dict[str, float] = {}
        self.may_grow = True
        self.is_up = False

    # -- the connection --------------------------------------------------------------------------

    def connect(self, cpus: int | None = None, *, verbose: bool = False) -> bool:
        """Begin."""
        began, self.is_up = not self.is_up, True
        return began

    def shutdown(self) -> None:
        """End everything."""
        self.is_up = False
        for actor in self.places.actors:
            if actor.process is not None and actor.process.alive:
                self.world.kill(actor.process, "Ray was shut down")

    def answers(self, seconds: float) -> bool:
        """Return True."""
        return True

    def leaves_sigterm(self, handler: object, status: int) -> bool:
        """Return False: the driver is the tests' own process."""
        return False

    # -- processes -------------------------------------------------------------------------------

    def start(
        self, body: type, arguments: Sequence[Any], at: tuple[Group, int], **needs: float
    ) -> Handle:
        """Start an actor."""
        sent = self.store.dump((tuple(arguments), {}))
        actor = Actor(self.places, self.store, body, at, needs, sent)
        self.places.start(actor)
        return actor.handle

    def call(self, process: Handle, method: str, *arguments: Any) -> Call:
        """Call a method of an actor."""
        return process.actor.call(method, arguments)

    def end(self, process: Handle) -> None:
        """Kill an actor, without waiting for its end."""
        self.world.event()
        process.actor.kill()

    def show_output(self, processes: Collection[Handle]) -> None:
        """Do nothing: processes are threads of this one."""

    def put(self, value: Any) -> Call:
        """Keep a copy of a value."""
        ref = Ref(self.store, "an object")
        ref.set(self.store.dump(value))
        return ref

    def get(self, calls: Collection[Ref], timeout: float | None = None) -> list[Any]:
        """Return values; raise the first error as soon as there is one."""
        self._take_time()
        several = list(calls)
        end = None if timeout is None else self.world.scheduler.now + timeout

        def is_over() -> bool:
            return any(r.error is not None for r in several) or all(r.ended for r in several)

        while not is_over():
            if not self._block(several, end):
                if is_over():
                    break
                raise LateError("get timed out")
        for ref in several:
            if ref.error is not None:
                ref.value()
        return [ref.value() for ref in several]

    def wait(
        self, calls: Collection[Ref], seconds: float | None, number: int | None = None
    ) -> list[Ref]:
        """Wait until so many calls have ended; return those that have."""
        self._take_time()
        several = list(calls)
        number = len(several) if number is None else number
        assert len(set(several)) == len(several)
        end = None if seconds is None else self.world.scheduler.now + seconds
        while sum(ref.ended for ref in several) < number:
            if not self._block([ref for ref in several if not ref.ended], end):
                break
        return [ref for ref in several if ref.ended][:number]

    def _take_time(self) -> None:
        self.world.scheduler.now += _CALL_SECONDS
        self.world.scheduler.clock()

    def _block(self, refs: Sequence[Ref], end: float | None) -> bool:
        scheduler = self.world.scheduler
        left = None if end is None else end - scheduler.now
        if left is not None and left <= 0:
            scheduler.check()
            return False
        waiting: Waiters = []
        me = scheduler.current
        for ref in refs:
            if not ref.ended:
                ref.waiting.append((me, me.wait + 1))
        return scheduler.block(waiting, left, f"{', '.join(ref.what for ref in refs[:4])}")

    # -- this process ------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """The id of the node of the thread that runs."""
        return self.world.here_node().id

    @property
    def host(self) -> str:
        """The address of that node."""
        return self.world.here_node().host

    @property
    def pid(self) -> int:
        """The number of the process of the thread that runs."""
        return self.world.getpid()

    def exit(self, status: int) -> None:
        """End that process."""
        self.world.exit(status)

    def kill(self, pid: int) -> None:
        """Kill a process of that node."""
        with contextlib.suppress(ProcessLookupError):
            self.world.send_signal(pid, signal.SIGKILL)

    def name_process(self, name: str) -> None:
        """Do nothing: processes are threads of this one."""

    def processor_use(self, pid: int) -> tuple[float, bool] | None:
        """Return the processor time of a process of that node; None if it is stopped or gone."""
        return self.world.processor_use(pid)

    def processor_state(self, pid: int) -> str:
        """Return what the kernel says of a process of that node."""
        return self.world.processor_state(pid)

    def last_lines(self, node: str, pid: int, logs: tuple[str, ...]) -> list[str]:
        """Return what the files of a living node have."""
        return last_lines(logs)

    def transport(
        self,
        token: bytes,
        peers: tuple[Peer, ...],
        node: str,
        sink: ChannelSink,
        ways: str = "wire",
        encryption: Encryption | None = None,
    ) -> Any:
        """Return channels on virtual time."""
        return SimulatedTransport(self.world.wires, token, peers, node, sink, ways)

    # -- nodes and room ------------------------------------------------------------------------------

    def nodes(self) -> dict[str, Mapping[str, float]]:
        """Return the nodes that Ray takes for alive."""
        further = self.world.further
        return {n.id: {"CPU": float(n.cpus), **further} for n in self.world.nodes if n.known_alive}

    def leaving_nodes(self) -> dict[str, float]:
        """Return the nodes of which `Simulation.give_notice` was told."""
        return {node: at and EPOCH + at for node, at in self.notices.items()}

    def free_by_node(self) -> dict[str, dict[str, float]]:
        """Return the CPUs that no group holds, by node."""
        return self.places.free_by_node()

    def total(self) -> dict[str, float]:
        """Return the CPUs of all nodes."""
        return {
            "CPU": sum(has["CPU"] for has in self.nodes().values()),
            **self.world.further,
        }

    def free(self) -> dict[str, float]:
        """Return the CPUs that no group holds."""
        return {"CPU": self.places.free(), **self.world.further}

    def group_around(self) -> None:
        """Return None: the driver runs in no group."""

    def ask(
        self,
        bundles: Sequence[dict[str, float]],
        how: str,
        without: Collection[str] = (),
        node: str | None = None,
    ) -> Any:
        """Reserve room for bundles, together, as soon as there is any."""
        return self.places.ask(bundles, how == "STRICT_SPREAD", without, node)

    def bundles(self, group: Any) -> dict[int, str]:
        """Return the node of each bundle."""
        return {
            at: "" if slot.node is None else slot.node.id for at, slot in enumerate(group.slots)
        }

    def is_placed(self, group: Any) -> bool:
        """Return whether all bundles are placed."""
        return bool(group.is_placed)

    def give_back(self, group: Any) -> None:
        """Give a group's room back."""
        self.places.give_back(group)

    def reserved(self, without: Collection[str]) -> list[dict[str, float]]:
        """Return the bundles that groups hold."""
        groups = [group for group in self.places.groups if group.hex() not in without]
        return [spec for group in groups if group.is_placed for spec in group.bundle_specs]
