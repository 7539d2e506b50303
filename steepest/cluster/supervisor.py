"""Keeps a job's processes as they are wanted: observes, takes stock, decides and applies, until no more is due."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import ray

from steepest.cluster.applying import Applied, Applying
from steepest.cluster.diagnostics import update_error
from steepest.cluster.job_state import JobState
from steepest.cluster.joining import Joining
from steepest.cluster.launch import Cluster
from steepest.cluster.observation import Observation, Wanted
from steepest.cluster.snapshots import Snapshots
from steepest.cluster.stock import Stock
from steepest.cluster.stocktaking import StockTaking
from steepest.cluster.telling import tell
from steepest.cluster.wishes import Wishes
from steepest.config.strategies import StrategyConfig
from steepest.elastic.decision import Impossible, Source, Transition, World, decide
from steepest.engine.client import Client
from steepest.errors import (
    DeadlineError,
    ModelError,
    ModelRaisedError,
    PeerLostError,
    ResourcesError,
    ShutdownError,
    StepError,
)
from steepest.messages.driver import WorkerLost
from steepest.messages.message import Peer

T = TypeVar("T")
log = logging.getLogger(__name__)
_NOTICE_SECONDS = 5.0  # that Ray takes, at most, to see that a process is gone
_SHORT_SECONDS = 0.02  # between two looks while processes start
_LONG_SECONDS = 1.0
_UNEXPLAINED = 3  # failures of one change for which no death of a member is found

#: Whether a change can be made when the workers have stopped, or cannot wait for that.
Due = Literal["soon", "now"]


class Supervisor:
    """Makes all changes of a job's processes: after deaths, and because somebody wants them.

    A thread looks at the processes all the time, also between calls of the trainer and while a
    callback takes long: it notices deaths, starts what is missing, and has successors join. A
    change for which workers have to stop is made by the thread that trains, or by this thread when
    the trainer is idle or in a callback. Methods may be called on any thread.

    Args:
        cluster: the job's processes.
        state: of the job.
        bounds: least and most number of workers.
        in_use: held while the trainer does anything with its processes.

    Attributes:
        replaced: how many dead processes were replaced, or done without.
        steps_lost: how many committed steps were lost because the state is that of a copy, and are
            made again; those lost because the optimizer raised are not.
        snapshots: copies of the job's state.
    """

    def __init__(
        self,
        cluster: Cluster,
        state: JobState,
        bounds: tuple[int, int],
        in_use: threading.RLock,
    ) -> None:
        least, most = bounds
        config = cluster.job.config
        exactly = Wanted.exactly(config, most)
        wanted = exactly if least == most else Wanted(config, least, most, exact=False)
        self.replaced = 0
        self.steps_lost = 0
        self.snapshots = Snapshots(cluster, state)
        self.observation = Observation(cluster, self.snapshots, wanted)
        self._wishes = Wishes(cluster, self.observation)
        self._cluster = cluster
        self._state = state
        self._joining = Joining(cluster, self.observation)
        self._applying = Applying(cluster, state, self.observation)
        self._lock = threading.RLock()
        self._suspect: tuple[Peer, str] | None = None
        self._looked = 0.0
        self._due: Due | None = None  # as found by the last look
        self._trained = 0.0  # seconds
        self._in_use = in_use
        self._error: Exception | None = None  # of the thread, for whoever looks next
        # of a user's optimizer that made an update in part, which was undone, for whoever looks next
        self._mistake: ModelRaisedError | None = None
        self._ended = threading.Event()
        self._turn = (
            threading.Lock()
        )  # to change the job; held by the thread that trains for moments
        self._elsewhere = False  # whether that thread is in a callback
        self._doing: Literal["", "joining", "changing"] = ""  # to the job's processes
        cluster.meanwhile = self._look_after_all
        cluster.ending.append(self.end)
        self._thread = threading.Thread(target=self._watch, name="steepest supervisor", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Look at the processes until the job ends; runs on a thread of its own."""
        while not self._ended.wait(self.pause):
            if self._error is not None or not ray.is_initialized():
                continue  # the user sees the error first; a call would begin Ray anew
            idle = self._in_use.acquire(blocking=False)
            try:
                due = None if self._ended.is_set() else self._look(patient=idle)
                if due is not None and idle:
                    self.change(patient=True)
                elif due == "now":
                    with self._turn:
                        if self._elsewhere:
                            self.change()
            except Exception as error:  # noqa: BLE001 - raised by the next `look` of a caller
                self._error = None if self._ended.is_set() else error
            finally:
                if idle:
                    self._in_use.release()

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Let the job be changed after a death in a block in which the thread that trains is in a callback.

        The block ends when a change that has begun is over. Another client says that there was one.
        """
        self._elsewhere = True
        try:
            yield
        finally:
            with self._turn:
                self._elsewhere = False

    @property
    def wanted(self) -> StrategyConfig:
        """The strategy that is wanted; the job may have fewer servers for a while."""
        return self.observation.wanted.config

    def want(self, config: StrategyConfig, workers: int | None = None) -> None:
        """Have another strategy, or number of servers or workers, see `Wishes.want`."""
        with self._lock:
            self._looked = 0.0
            self._wishes.want(config, workers)

    def _look_after_all(self) -> None:
        """Look whether any process has turned silent, while calls of some of them are waited for.

        Raises:
            PeerLostError: one has, and is ended; or no server sends weights, because the optimizer
                raised.
        """
        if self._cluster.client.torn is not None and not self._doing:
            raise PeerLostError("servers send no weights: the optimizer raised")
        if not self._lock.acquire(blocking=False):
            return  # another thread looks
        try:
            changing = self._is_changing
            silent, others = self.observation.ask_for_signs(changing=changing)
        finally:
            self._lock.release()
        silent += others if self._doing else []
        if silent:
            raise PeerLostError(f"{', '.join(silent)} gave no sign of life")

    # -- looking ---------------------------------------------------------------------------------

    def look(self, trained: float = 0.0) -> Due | None:
        """Return what is due, see `_look`; to be called often.

        Args:
            trained: seconds of training so far.

        Raises:
            PeerLostError: the job cannot continue.
            ModelError, ModelRaisedError: a dead worker's successor could not build the job's model;
                or the optimizer raised, and the job was set back.
        """
        self._trained = trained
        self.snapshots.remember()
        self.raise_mistake()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._look(patient=False)

    def _look(self, *, patient: bool) -> Due | None:
        """Start the processes that are missing, have those join that can; return what is due besides.

        Where that was done a moment ago, or another thread does it, nothing is done.

        Args:
            patient: whether dead workers' successors are awaited, however long that takes.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            torn = self._cluster.client.torn is not None
            if torn or self._suspect is not None or self._state.pending is not None:
                return "now"
            if self._is_time():
                self._due = self._find_due(patient=patient)
            return self._due
        finally:
            self._lock.release()

    def _find_due(self, *, patient: bool) -> Due | None:
        observation = self.observation
        observation.fill_reserve(self._trained)
        observation.ask_for_signs()
        dead = observation.dead()
        observation.tell_job(dead)
        world = self._look_at(dead, observation.worn_out(dead), patient=patient)
        if world.stuck:
            return "now"
        found = self._decided(world, dead)
        if found is None:
            return None
        if not dead:
            return "soon"
        self._doing = "joining"
        try:
            joined = self._joining.join(found, dead)
        finally:
            self._doing = ""
        if joined is None:
            return "now"
        self.replaced += joined
        self._looked = 0.0
        return None

    @property
    def pause(self) -> float:
        """Seconds between two looks: few while processes start."""
        observation = self.observation
        if list(observation.starting) or observation.growth.is_waiting:
            return _SHORT_SECONDS
        return min(_LONG_SECONDS, self._cluster.run_config.failure.heartbeat / 6)

    def _is_time(self) -> bool:
        if time.monotonic() - self._looked < self.pause:
            return False
        self._looked = time.monotonic()
        return True

    def _look_at(
        self, dead: Mapping[Peer, str], worn_out: frozenset[Peer], *, patient: bool
    ) -> World:
        """Start what is missing, and return what is known then."""
        observation = self.observation
        if dead:
            plain = all(map(observation.is_plain, dead))
            successors = {peer: why for peer, why in dead.items() if peer not in worn_out}
            observation.start_successors(successors, cold=plain)
            observation.tell_who_is_awaited()
            return observation.world(dead, worn_out, patient=patient)
        try:
            observation.start_missing()
            return observation.world(dead, worn_out, patient=patient)
        except (ResourcesError, ModelError, StepError) as error:
            if isinstance(error, (PeerLostError, DeadlineError)):
                raise
            log.warning("%s", error)
            self._wishes.refuse(error)
            return observation.world(dead, worn_out, patient=patient)

    def _decided(self, world: World, dead: Mapping[Peer, str]) -> Transition | None:
        """Return what is decided.

        Raises:
            PeerLostError: the job cannot continue.
        """
        decided = decide(world, self.observation.target(world))
        if isinstance(decided, Impossible):
            if decided.peer is None:
                raise PeerLostError(decided.why)
            allowed = self._cluster.run_config.failure.max_failures
            often = f": FailureConfig(max_failures={allowed}) allows no more"
            slow = f"; {self.observation.starting.patience:g} s were waited: add nodes"
            why = decided.why + (often if decided.peer in world.worn_out else "")
            why += slow if decided.peer in world.late - world.worn_out else ""
            self._cluster.deaths.raise_lost(decided.peer, f"{dead[decided.peer]} ({why})")
        return decided

    def hear(self, lost: WorkerLost) -> None:
        """Take the coordinator's word that a worker is gone."""
        with self._lock:
            self.observation.hear(lost)
            self._looked = 0.0

    def suspects(self, peer: Peer, why: str, client: Client) -> bool:
        """Note that a role's channel has closed; return False if its process cannot be replaced.

        Nothing is noted where the job was put together meanwhile: other processes have the roles.

        Args:
            peer: the role.
            why: what is said of it.
            client: which has seen it.
        """
        with self._lock:
            if self._cluster.client is not client:
                return True
            process = self._cluster.process_of(peer)
            if not self.observation.can_replace(process):
                return False
            self._suspect = process, why
            return True

    # -- changing --------------------------------------------------------------------------------

    def change(self, *, patient: bool = False) -> None:
        """Put the job together as it is decided; once more whenever a process dies meanwhile.

        Args:
            patient: whether dead workers' successors are awaited, however long that takes.

        Raises:
            PeerLostError: the job cannot continue.
            DeadlineError: successors that are needed did not come up.
            ModelRaisedError: the optimizer raised, and there is no copy of the state from before.
        """
        with self._lock:
            began, before = time.monotonic(), self._cluster.job
            client, places = self._cluster.client, dict(self._cluster.places)
            version, step = self._cluster.client.position.version, self._cluster.step
            said: dict[Any, str] = {}  # by the call that watched the process
            hosts = self._hosts_left()
            self._doing = "changing"
            try:
                applied = self._change(said, patient=patient)
            except BaseException:
                self.observation.starting.give_up(self.observation.starting.instead.values())
                raise
            finally:
                self._doing, self._looked, self._due = "", 0.0, None
            if applied is None:
                return
            if client.torn is not None:
                self._mistake = update_error(client.torn, places, self._cluster.step)
            else:
                self.steps_lost += max(step - self._cluster.step, 0)
            self._cluster.await_successors(())
            self._joining = Joining(self._cluster, self.observation)
            self.snapshots.interrupted()
            self._wishes.end_if_granted()
            alike = before.versions_per_step == self._cluster.job.versions_per_step
            cluster = self._cluster
            now = cluster.client.position.version if alike else before.version_of(cluster.step)
            lost = max(version - now, 0)
            self.replaced += applied.replaced
            again = client.torn is None
            dead = list(said.values())
            tell(self._cluster, applied, before, dead, lost, hosts, began, again=again)
            if any(start.cause for start in applied.joined.values()):
                self.observation.refill_reserve()

    def _hosts_left(self) -> str:
        """Return which nodes are being left, and why, in words."""
        leaving = self.observation.leaving
        hosts = sorted({self._cluster.places[peer].host for peer in leaving.peers})
        return f"{', '.join(hosts)} {next(iter(leaving.nodes.values()), '')}"

    def _change(self, said: dict[Any, str], *, patient: bool) -> Applied | None:
        """Find the dead, take stock, decide and apply; return what was done, None for nothing.

        Args:
            said: is given what is said of each dead process.
        """
        cluster, observation, pending = self._cluster, self.observation, self._state.pending
        taking = StockTaking(cluster, self._state, observation.signs, self.snapshots)
        suspect, self._suspect = self._suspect, None
        dead = taking.find_dead(*(suspect or (None, "")))
        stock: Stock | None = pending
        unexplained = 0
        while True:
            worn_out = observation.worn_out(dead)
            in_vain = worn_out | observation.late(dead)
            said |= {cluster.watches[p]: self._said(p, why, worn_out) for p, why in dead.items()}
            cluster.await_successors(dead)
            try:
                world = self._look_at(dead, worn_out, patient=patient)
                torn = cluster.client.torn is not None
                if torn or stock is not None or taking.has_begun:  # all stand still
                    world = replace(world, stuck=True)
                elif self._decided(world, dead) is None:
                    return None
                if stock is None:
                    stock = self._take_stock(taking, world, dead)
                world = replace(world, whole=stock.is_held_by(cluster.living()))
                transition = self._decided(world, dead) or _as_it_is(world)
                copy = self.snapshots.taken
                if transition.source == "snapshot" and not stock.copied and copy is not None:
                    stock = Stock.from_copy(copy)
                observation.signs.forget()
                return self._applying.apply(transition, world, dead, stock)
            except (PeerLostError, DeadlineError) as error:
                stock = self._state.pending or stock
                observation.starting.joined(cluster.actors.values())
                dead = taking.find_dead(*self._struck(said, error))
                known = {cluster.watches[peer] for peer in dead} <= said.keys()
                if known and observation.worn_out(dead) | observation.late(dead) == in_vain:
                    unexplained += 1  # perhaps of a process that had no role yet
                    if isinstance(error, DeadlineError) or unexplained > _UNEXPLAINED:
                        raise

    def _said(self, peer: Peer, why: str, worn_out: Collection[Peer]) -> str:
        """Return what is said of a dead process."""
        if peer in worn_out:
            allowed = self._cluster.run_config.failure.max_failures
            why += f"; it had {allowed} successors, FailureConfig(max_failures={allowed}) gives it no more"
        return f"{peer} on {self._cluster.places[peer].host} ({why})"

    def _take_stock(self, taking: StockTaking, world: World, dead: Mapping[Peer, str]) -> Stock:
        """Stop the survivors, and return everything with which the job continues."""
        as_it_was = dead or world.leaving  # another strategy, if one is wanted, comes next
        config = self._cluster.job.config if as_it_was else self.observation.wanted.config
        return taking.take(dead, taking.standing(dead, config))

    def _struck(self, said: Collection[Any], error: Exception) -> tuple[Peer | None, str]:
        """Return the process whose channel has closed, if that ended a change, and what is said of it.

        Otherwise Ray has some seconds to notice a death.

        Args:
            said: the calls that watched the processes that are known to be dead.
            error: that ended the change.
        """
        cluster = self._cluster
        lost = cluster.client.lost_peer
        if lost is not None and self._state.pending is None:
            process = cluster.process_of(lost)
            if cluster.watches.get(process) not in said:
                return process, str(error)
        others = [watch for watch in cluster.watches.values() if watch not in said]
        if others and isinstance(error, PeerLostError):
            ray.wait(others, timeout=_NOTICE_SECONDS)
        return None, ""

    # -- between steps ---------------------------------------------------------------------------

    def settle(self, *, asked: bool = False) -> None:
        """Return when no process is dead, and what the user has asked for is there, or was refused.

        Args:
            asked: whether the caller has asked for something just now.

        Raises:
            PeerLostError, DeadlineError: the job cannot continue.
            ResourcesError: what the caller has asked for cannot be had.
            ModelRaisedError: the optimizer raised, and the job was set back.
        """
        while not self._is_settled(asked=asked):
            starts = [call for start in self.observation.starting for call in start.building]
            if starts:
                ray.wait(starts, num_returns=len(starts), timeout=_SHORT_SECONDS)
            else:
                time.sleep(_SHORT_SECONDS)
        self.raise_mistake()

    def raise_mistake(self) -> None:
        """Raise, once, for an optimizer that raised, when the job has been set back."""
        mistake, self._mistake = self._mistake, None
        if mistake is not None:
            raise mistake

    def _is_settled(self, *, asked: bool) -> bool:
        """Make the changes that are due; return whether nothing is left to wait for."""
        with self._lock:
            self._looked, self._error = 0.0, None  # what has failed fails again
            while self._look(patient=True) is not None:
                self.change(patient=True)
                self._looked = 0.0
            return not self.observation.dead() and self._wishes.are_granted(asked=asked)

    def surviving(self, function: Callable[[], T]) -> T:
        """Return what a function returns; call it once more whenever a process dies meanwhile.

        Raises:
            PeerLostError, DeadlineError: what failed was no death, or the job cannot continue.
        """
        while True:
            self.settle()
            before = self._processes()
            try:
                return function()
            except (PeerLostError, DeadlineError):
                if not self.is_struck(before):
                    raise

    def replacing(self, function: Callable[[], None]) -> None:
        """Call a function that sets another state, and copy that; both again if a process dies meanwhile.

        Raises:
            PeerLostError, DeadlineError: what failed was no death, or the job cannot continue.
        """

        def whole() -> None:
            try:
                function()
            except (PeerLostError, DeadlineError):
                raise  # the last copy serves to begin again
            except BaseException:
                self.snapshots.forget()
                raise
            if self.snapshots.renew(self._look_after_all):
                return
            if self._cluster.client.lost_peer is not None or self.observation.dead():
                raise PeerLostError("a process died before there was a copy of the state")
            self.snapshots.forget()

        self.surviving(whole)

    def reading(self, function: Callable[[], T]) -> T:
        """Return what a function returns that reads from the job, also amid training.

        It is called once more when the job was put together anew after a death meanwhile.

        Raises:
            PeerLostError, DeadlineError, ShutdownError: what failed was no death, or the job cannot
                continue.
            ModelRaisedError: the optimizer raised, and the job was set back.
        """
        cluster = self._cluster
        while True:
            self.raise_mistake()
            before = self._processes()
            (client, _), changing, failed = before, self._is_changing, False
            if not changing:
                try:
                    found = function()
                except (PeerLostError, DeadlineError, ShutdownError):
                    struck = self._is_changing or self.is_struck(before)
                    if self._ended.is_set() or not struck:
                        raise
                    failed = True
                else:  # what was read amid a change may be of no version
                    if not self._is_changing and cluster.client is client:
                        return found
            if self._in_use.acquire(blocking=False):
                try:
                    self.settle()
                finally:
                    self._in_use.release()
            else:
                self._await_change(client if failed else None)

    def _processes(self) -> tuple[Client, set[Any]]:
        """Return what differs after each change of the job's processes."""
        return self._cluster.client, {*self._cluster.watches.values()}

    @property
    def _is_changing(self) -> bool:
        """Whether some thread is putting the job together."""
        return self._doing == "changing"

    def _await_change(self, client: Client | None) -> None:
        """Return when the job is not being put together.

        Args:
            client: which failed, so that there must be another one; None if none has.

        Raises:
            DeadlineError: it still is after `DeadlineConfig.step` seconds.
        """
        limit = self._cluster.run_config.deadlines.step
        deadline = time.monotonic() + limit
        while (
            self._is_changing
            or self._state.pending is not None
            or (client is not None and self._cluster.client is client)
        ):
            if time.monotonic() > deadline or self._ended.is_set():
                raise DeadlineError(f"the job was not put together again within {limit:g} s")
            time.sleep(_SHORT_SECONDS)

    def is_struck(self, before: tuple[Client, set[Any]]) -> bool:
        """Return whether a process is dead, or a channel has closed; the next change handles it.

        Args:
            before: the processes when what failed began, see `_processes`; if others are there now,
                one has died, and was handled.
        """
        torn = before[0].torn is not None
        known = torn or self._state.pending is not None or self._suspect is not None
        if known or self._processes() != before:
            return True
        if (peer := before[0].lost_peer) is not None:
            return self.suspects(peer, "its channel closed", before[0])
        ray.wait(list(self._cluster.watches.values()), timeout=_NOTICE_SECONDS)
        return bool(self.observation.dead()) or self._processes() != before

    @property
    def lacks_copies(self) -> bool:
        """Whether the job goes on with fewer servers than are wanted."""
        job, observation = self._cluster.job, self.observation
        servers = sum(peer.role == "server" for peer in self._cluster.actors)
        return servers < self._cluster.serving(observation.wanted.config, job.num_workers)

    def end(self) -> None:
        """End the thread, and the processes that are no part of the job, for its shutdown."""
        self._ended.set()
        alone = self._lock.acquire(timeout=_NOTICE_SECONDS)  # what is being started is known then
        self.observation.growth.cancel()
        self.observation.leaving.end()
        self.observation.starting.give_up(list(self.observation.starting))
        self.observation.reserve.end()
        if alone:
            self._lock.release()
        if threading.current_thread() is not self._thread:  # a dropped trainer may be found on it
            self._thread.join(_NOTICE_SECONDS)


def _as_it_is(world: World) -> Transition:
    """Return the transition that changes nothing, to finish a change whose cause is gone."""
    source: Source = "processes" if world.whole else "snapshot"
    return Transition(source, frozenset(), frozenset(), world.workers, world.servers)
