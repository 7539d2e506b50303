"""A connection whose callers move the bytes: from any thread, with deadlines, and never left hanging."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from steepest.core.messages.message import Kind, Message
from steepest.errors import (
    DeadlineError,
    NonFiniteError,
    PeerLostError,
    ShutdownError,
    SteepestError,
)
from steepest.parameter_server import connection
from tests.group_in_one_thread import GroupInOneThread, User, like, values, zeros
from tests.said import said

SECONDS = 30.0


class Everybody:
    """A user's router, whose turns are everybody's: servers live as long as somebody waits for them."""

    def __init__(self, crowd: GroupInOneThread, user: User) -> None:
        self._crowd = crowd
        self._user = user
        self.transport = user.router.transport
        self.call = user.router.call
        self.owned: list[Any] = []
        self.threads: set[int] = set()
        self.now = 0.0
        self.takes = 0.01  # seconds of a turn
        self.busy = threading.Lock()
        self.trouble: Callable[[], None] = lambda: None

    def turn(self, seconds: float) -> None:
        assert self.busy.acquire(blocking=False), "two threads move bytes at once"
        try:
            self.threads.add(threading.get_ident())
            self.trouble()
            self._crowd.turn()
            self.now += self.takes
        finally:
            self.busy.release()

    def own_pending(self, memory: torch.Tensor) -> None:
        self.owned.append(memory)


class Setup:
    """A connection to servers of the same thread, or of whichever thread waits."""

    def __init__(self, timeout: float = SECONDS, max_in_flight: int = 4) -> None:
        self.crowd = GroupInOneThread(None, 3, 2)
        self.user = self.crowd.users[0]
        self.router: Any = Everybody(self.crowd, self.user)
        self.connection = connection.Connection(
            self.router, self.user.pusher, lambda: self.user.client, name="it", timeout=timeout,
            max_in_flight=max_in_flight, clock=lambda: self.router.now,
        )  # fmt: skip

    def push(self, update: Any = None) -> int:
        memory = self.crowd.arrays.bytes_of(
            like(zeros(), 1) if update is None else update, "update"
        )
        return self.connection.run(lambda: self.user.pusher.push(memory), "a push", memory.values())

    def push_async(self, update: Any = None) -> Future[int]:
        memory = self.crowd.arrays.bytes_of(
            like(zeros(), 1) if update is None else update, "update"
        )
        return self.connection.push_async(
            lambda: self.user.pusher.push(memory), list(memory.values())
        )

    def pull(self) -> tuple[int, Any]:
        wanted, pulled = self.crowd.arrays.request(None, None, None)
        return self.connection.run(lambda: self.user.pusher.pull(wanted), "a pull"), pulled

    def silence(self, kind: Kind | None = None) -> None:
        """From now on nothing of that kind, or nothing at all, arrives."""
        self.crowd.network.filter = lambda message: (
            [] if kind in (None, message.kind) else [message]
        )


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.connection.close()
    for thread in threading.enumerate():
        if thread.name == "steepest pushes":
            thread.join(SECONDS)
            assert not thread.is_alive()


def together(*work: Callable[[], Any]) -> list[Any]:
    """Runs functions in threads of their own, begun at the same time."""
    gate = threading.Barrier(len(work))

    def begin(function: Callable[[], Any]) -> Any:
        gate.wait(SECONDS)
        return function()

    with ThreadPoolExecutor(len(work)) as pool:
        return [
            future.result(SECONDS) for future in [pool.submit(begin, function) for function in work]
        ]


def test_whoever_waits_moves_the_bytes_and_no_thread_is_begun(setup: Setup) -> None:
    before = threading.active_count()
    assert [setup.push() for _ in range(3)] == [1, 2, 3]
    version, pulled = setup.pull()
    assert (version, values(pulled)) == (3, {3})
    assert setup.router.threads == {threading.get_ident()}
    assert threading.active_count() == before


def test_threads_that_share_a_connection_lose_nothing_and_see_whole_updates(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        connection, "_TURN_SECONDS", 2 * SECONDS
    )  # each is told by the others what they did for it

    def work() -> list[int]:
        made = []
        for number in range(20):
            if number % 3:
                made.append(setup.push())
            else:
                made.append(setup.push_async().result(SECONDS))
            version, pulled = setup.pull()
            assert version >= made[-1]
            assert values(pulled) == {version}
        return made

    made = together(*[work] * 4)
    assert sorted(version for versions in made for version in versions) == list(range(1, 81))
    assert setup.pull()[0] == 80


def test_a_push_that_nobody_waits_for_is_committed_by_the_connections_own_thread(
    setup: Setup,
) -> None:
    futures = [setup.push_async() for _ in range(3)]
    assert [future.result(SECONDS) for future in futures] == [1, 2, 3]
    assert threading.get_ident() not in setup.router.threads
    again = setup.push_async()  # the thread waits for it
    assert again.result(SECONDS) == 4


def test_only_so_many_pushes_are_in_flight(setup: Setup) -> None:
    most = []

    def see(message: Message) -> list[Message]:
        most.append(setup.user.pusher.pushing)
        return [message]

    setup.crowd.network.filter = see
    futures = [setup.push_async() for _ in range(30)]
    assert futures[-1].result(SECONDS) == 30
    assert max(most) == 4


def test_what_is_in_flight_is_owned_so_that_arrays_may_be_changed(setup: Setup) -> None:
    update = like(zeros(), 1)
    addresses = {
        memory.ctypes.data for memory in setup.crowd.arrays.bytes_of(update, "it").values()
    }
    setup.push(update)
    assert setup.router.owned == []  # it was waited for
    setup.push_async(update)
    assert {memory.ctypes.data for memory in setup.router.owned} == addresses


def test_flush_waits_for_all_that_is_in_flight(setup: Setup) -> None:
    futures = [setup.push_async() for _ in range(4)]
    setup.connection.flush()
    assert [future.result(0) for future in futures] == [1, 2, 3, 4]
    setup.connection.flush()


def test_a_deadline_says_who_and_what_and_leaves_the_arrays_to_their_owner() -> None:
    setup = Setup(timeout=0.2)
    setup.silence()
    with pytest.raises(DeadlineError, match=r"it: waited 0.2 s in vain for a pull"):
        setup.pull()
    update = like(zeros(), 1)
    with pytest.raises(DeadlineError, match="a push"):
        setup.push(update)
    addresses = {
        memory.ctypes.data for memory in setup.crowd.arrays.bytes_of(update, "it").values()
    }
    assert {memory.ctypes.data for memory in setup.router.owned} == addresses
    with pytest.raises(DeadlineError, match="pushes to be committed"):
        setup.connection.flush()
    with closing(setup.connection):
        setup.router.takes = (
            0.0  # of the connection's own thread, which takes turns from the first push on
        )
        for _ in range(3):
            setup.push_async()
        setup.router.takes = 0.01
        with pytest.raises(DeadlineError, match="a push to leave"):
            setup.push_async()


@pytest.mark.parametrize("push", [False, True])
def test_after_a_deadline_answers_are_dropped_and_the_callers_memory_is_its_own(push: bool) -> None:
    setup = Setup(timeout=0.2)
    out, arrays, pusher = like(zeros(), 7), setup.crowd.arrays, setup.user.pusher
    update = arrays.bytes_of(like(zeros(), 1), "update")
    wanted, _ = arrays.request(None, None, out)
    setup.crowd.network.latency = lambda message: 50 if message.kind is Kind.WEIGHTS else 0
    with pytest.raises(DeadlineError, match="it: waited"):
        setup.connection.run(
            lambda: pusher.push(update, wanted) if push else pusher.pull(wanted), "it"
        )
    for array in out.values():
        array[...] = -1
    setup.crowd.network.latency = lambda message: 0
    setup.crowd.settle()
    assert values(out) == {-1}
    assert setup.crowd.idle()
    assert setup.pull()[0] == push
    setup.connection.close()


def test_after_the_loss_of_a_server_nothing_is_written_to_the_memory_of_its_requests(
    setup: Setup,
) -> None:
    dropped: list[Any] = []
    setup.user.pusher._drop_arriving = dropped.append
    wanted, _ = setup.crowd.arrays.request(None, None, like(zeros(), 7))
    future = setup.user.pusher.pull(wanted)
    chunk = next(c for c in setup.crowd.arrays.layout.chunks if len(c.slices) == 1)
    arriving = said(Kind.WEIGHTS, sequence=setup.user.pusher._reads, chunk=chunk.index)
    target = setup.user.pusher.destination(arriving, chunk.nbytes)
    setup.crowd.network.remove(setup.crowd.routers[1])
    with pytest.raises(PeerLostError):
        setup.crowd.wait(future)
    assert [memory is target for memory in dropped] == [True]


def test_a_deadline_holds_although_others_are_busy() -> None:
    setup = Setup(timeout=0.5)
    setup.silence(Kind.SNAPSHOT_END)  # pulls are never whole
    done = threading.Event()

    def busy() -> None:
        while not done.is_set():
            setup.push()

    def wait() -> None:
        try:
            with pytest.raises(DeadlineError, match="a pull"):
                setup.pull()
        finally:
            done.set()

    together(busy, wait)
    setup.connection.close()


def test_what_servers_find_is_raised_and_others_go_on(setup: Setup) -> None:
    spoiled = like(zeros(), 1)
    spoiled["a"][0, 0] = np.nan
    bad = setup.push_async(spoiled)
    good = setup.push_async()
    with pytest.raises(NonFiniteError, match="'a'"):
        setup.push(spoiled)
    with pytest.raises(NonFiniteError, match="'a'"):
        bad.result(SECONDS)
    assert good.result(SECONDS) == 1


def test_a_callback_may_push_on_but_not_wait(setup: Setup) -> None:
    followed: list[Future[int]] = []
    caught: list[BaseException] = []

    def follow(future: Future[int]) -> None:
        if len(followed) < 3:
            followed.append(setup.push_async())
            followed[-1].add_done_callback(follow)
        for wait in (setup.pull, setup.push, setup.connection.flush):
            try:
                wait()
            except SteepestError as error:
                caught.append(error)

    setup.push_async().add_done_callback(follow)
    while len(followed) < 3 or not followed[-1].done():
        setup.pull()
    assert followed[-1].result(0) == 4
    setup.connection.flush()
    while len(caught) < 12:
        setup.pull()  # the last callback runs in the other thread
    assert all(
        "a callback of a future may push_async, but not wait" in str(error) for error in caught
    )
    assert setup.pull()[0] == 4


def test_closing_ends_whatever_waits_in_any_thread() -> None:
    setup = Setup(timeout=1e9)  # whoever waits takes turns, in each of which time passes
    setup.silence()
    setup.push_async()  # for flush to wait for
    begun = threading.Semaphore(0)

    def wait(what: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            begun.release()
            with pytest.raises(ShutdownError):
                what()

        return run

    def close() -> None:
        for _ in range(4):
            assert begun.acquire(timeout=SECONDS)
        setup.connection.close()

    counters = setup.user.client.counters
    asking = wait(lambda: setup.connection.run(counters, "the version"))
    together(wait(setup.pull), wait(setup.push), wait(setup.connection.flush), asking, close)
    for late in (
        setup.pull,
        setup.push,
        setup.connection.flush,
        lambda: setup.push_async().result(0),
    ):
        with pytest.raises(ShutdownError):
            late()
    with pytest.raises(ShutdownError):
        setup.connection.run(counters, "the version")
    setup.connection.close()
    assert setup.connection.closed


def test_a_callback_may_close(setup: Setup) -> None:
    closed = threading.Event()

    def close(future: Future[int]) -> None:
        setup.connection.close()
        closed.set()

    setup.push_async().add_done_callback(close)
    assert closed.wait(SECONDS)
    with pytest.raises(ShutdownError):
        setup.pull()


def test_a_server_that_is_gone_is_told_to_all_also_to_flush(setup: Setup) -> None:
    setup.silence()
    futures = [setup.push_async() for _ in range(2)]
    other = setup.user.links[1].other
    assert other is not None
    assert not setup.connection.lost()
    other.close()
    for wait in (setup.connection.flush, setup.pull, setup.push):
        with pytest.raises(
            PeerLostError, match="server 1 of the parameter server is gone .*shut down or died"
        ):
            wait()
    for ask in (lambda: setup.user.client.counters(), lambda: setup.user.client.read("state")):
        with pytest.raises(PeerLostError, match="server 1 of the parameter server is gone"):
            setup.connection.run(ask, "it")
    for future in futures:
        with pytest.raises(PeerLostError):
            future.result(0)
    assert setup.connection.lost()


def test_a_loss_is_found_without_waiting(setup: Setup) -> None:
    assert not setup.connection.lost()
    other = setup.user.links[2].other
    assert other is not None
    other.close()
    while not setup.connection.lost():
        pass  # every look moves a message
    assert not setup.connection.closed


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, AssertionError])
def test_what_breaks_off_in_the_middle_closes_the_connection(
    setup: Setup, interruption: Any
) -> None:
    futures = [setup.push_async().result(SECONDS) for _ in range(2)]

    def interrupt() -> None:
        raise interruption

    setup.router.trouble = interrupt
    with pytest.raises(interruption):
        setup.pull()
    assert setup.connection.closed
    assert futures == [1, 2]
    with pytest.raises(ShutdownError, match="broke off"):
        setup.push()


def test_what_it_is_reached_through_is_let_alone_once_that_is_shut_down(setup: Setup) -> None:
    usable = True
    through = connection.Connection(
        setup.router, setup.user.pusher, lambda: setup.user.client, name="it", timeout=1.0, max_in_flight=1,
        reach=connection.Reach(usable=lambda: usable),
    )  # fmt: skip
    wanted, _ = setup.crowd.arrays.request(None, None, None)
    assert through.run(lambda: setup.user.pusher.pull(wanted), "a pull") == 0
    usable = False
    setup.router.threads.clear()
    with pytest.raises(ShutdownError, match="reached through is shut down"):
        through.run(lambda: setup.user.pusher.pull(wanted), "a pull")
    assert setup.router.threads == set()
    assert through.closed
    assert through.lost()
