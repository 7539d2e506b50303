"""A stand-in for the module `ray`, with what steepest uses of it, on virtual time.

Its exceptions are those of Ray itself.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import ray as real

from tests.simulation.simulated_actors import Actor, Handle
from tests.simulation.simulated_objects import Ref, Store, task_error
from tests.simulation.simulated_placement import Group, InGroup, Places
from tests.simulation.simulated_processes import World
from tests.simulation.virtual_threads import Waiters

_CALL_SECONDS = 2e-4  # that `get` and `wait` take at least


class _ActorClass:
    def __init__(self, ray: SimulatedRay, made: Any, options: Mapping[str, Any]) -> None:
        self._ray, self._made, self._options = ray, made, dict(options)

    def options(self, **options: Any) -> _ActorClass:
        """Return the same class with other options."""
        return _ActorClass(self._ray, self._made, {**self._options, **options})

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """Start an actor, or a task."""
        if isinstance(self._made, type):
            sent = self._ray.store.dump((arguments, named))
            places = self._ray.places
            actor = Actor(places, self._ray.store, self._made, self._options, sent)
            places.start(actor)
            return actor.handle
        return self._ray.start_task(self._made, arguments, named)


class SimulatedRay:
    """What `import ray` stands for in a simulation; `places` are placement groups and actors, `store` objects."""

    exceptions = real.exceptions
    ObjectRef = Ref
    __version__ = real.__version__

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = Store(world.scheduler)
        self.places = Places(world, self.store)
        self._running = False
        self.util = types.SimpleNamespace(
            get_current_placement_group=lambda: None,
            get_node_ip_address=lambda: world.here_node().host,
        )

    # -- the session ---------------------------------------------------------------------------

    def is_initialized(self) -> bool:
        """Return whether `init` was called."""
        return self._running

    def init(self, **_: Any) -> None:
        """Begin."""
        self._running = True

    def shutdown(self) -> None:
        """End everything."""
        self._running = False
        for actor in self.places.actors:
            if actor.process is not None and actor.process.alive:
                self.world.kill(actor.process, "Ray was shut down")

    def get_runtime_context(self) -> Any:
        """Return where the calling thread runs."""
        return types.SimpleNamespace(
            get_node_id=lambda: self.world.here_node().id, get_job_id=lambda: "01"
        )

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes, as Ray knows them."""
        return [
            {"NodeID": n.id, "Alive": n.known_alive, "Resources": {"CPU": float(n.cpus)},
             "NodeManagerAddress": n.host}
            for n in self.world.nodes
        ]  # fmt: skip

    def cluster_resources(self) -> dict[str, float]:
        """Return the CPUs of all nodes."""
        return {"CPU": float(sum(node.cpus for node in self.world.nodes if node.known_alive))}

    def available_resources(self) -> dict[str, float]:
        """Return the CPUs that no placement group holds."""
        return {"CPU": self.places.free()}

    # -- calls ---------------------------------------------------------------------------------

    def remote(self, *made: Any, **options: Any) -> Any:
        """Make an actor class, or a task, of a class or a function."""
        if made:
            return _ActorClass(self, made[0], options)
        return lambda function: _ActorClass(self, function, options)

    def start_task(self, function: Any, arguments: Any, named: Any) -> Ref:
        """Run a function somewhere."""
        ref, sent = Ref(self.store, "a task"), self.store.dump((arguments, named))

        def run() -> None:
            loaded, others = self.store.load(sent)
            try:
                ref.set(self.store.dump(function(*loaded, **others)))
            except Exception as error:  # noqa: BLE001 - the caller's
                ref.fail(task_error("task", error))

        self.world.scheduler.spawn(run, "task", None)
        return ref

    def kill(self, actor: Handle, no_restart: bool = True) -> None:
        """Kill an actor, without waiting for its end."""
        self.world.event()
        actor._actor.kill()

    def put(self, value: Any) -> Ref:
        """Keep a copy of a value."""
        ref = Ref(self.store, "an object")
        ref.set(self.store.dump(value))
        return ref

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        """Return values; raise the first error as soon as there is one."""
        self._take_time()
        several = [refs] if isinstance(refs, Ref) else list(refs)
        end = None if timeout is None else self.world.scheduler.now + timeout

        def is_over() -> bool:
            return any(r.error is not None for r in several) or all(r.done for r in several)

        while not is_over():
            if not self._block(several, end):
                if is_over():
                    break
                raise real.exceptions.GetTimeoutError("get timed out")
        for ref in several:
            if ref.error is not None:
                ref.value()
        values = [ref.value() for ref in several]
        return values[0] if isinstance(refs, Ref) else values

    def wait(
        self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        """Wait until so many calls have ended; return those that have, and the others."""
        self._take_time()
        several = list(refs)
        if not several:
            return [], []
        assert len(set(several)) == len(several)
        end = None if timeout is None else self.world.scheduler.now + timeout
        while sum(ref.done for ref in several) < num_returns:
            if not self._block([ref for ref in several if not ref.done], end):
                break
        ready = [ref for ref in several if ref.done][:num_returns]
        return ready, [ref for ref in several if ref not in ready]

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
            if not ref.done:
                ref.waiting.append((me, me.wait + 1))
        return scheduler.block(waiting, left, f"{', '.join(ref.what for ref in refs[:4])}")

    def stand_ins(self) -> list[tuple[Any, Any]]:
        """Return each thing of Ray's that steepest imports, with its stand-in."""
        groups = importlib.import_module("ray.util.placement_group")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        return [
            (real, self),
            (groups.PlacementGroup, Group),
            (groups.placement_group, self.places.placement_group),
            (groups.placement_group_table, self.places.placement_group_table),
            (groups.remove_placement_group, self.places.remove_placement_group),
            (strategies.PlacementGroupSchedulingStrategy, InGroup),
            (strategies.NodeAffinitySchedulingStrategy, types.SimpleNamespace),
        ]
