"""Pushes of a parameter server's users: each is applied once and whole, in one order for everybody, or not at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.messages.message import Kind, Message
from steepest.errors import NonFiniteError, PeerLostError, ShutdownError
from tests.group_in_one_thread import (
    FIRST,
    OPTIMIZERS,
    GroupInOneThread,
    Reordered,
    Replayed,
    late,
    like,
    twice,
    values,
    zeros,
)
from tests.inside import buffers_of, remembered_by
from tests.random_examples import SEEDS, runs
from tests.said import said

some = runs(25)
INITIAL = {
    "one float array": lambda: np.zeros((7, 5)),
    "one integer array": lambda: np.zeros(33, dtype=np.int64),
    "a scalar": lambda: torch.zeros((), dtype=torch.float64),
    "a dict": zeros,
}
crowds = st.tuples(st.integers(1, 3), st.integers(1, 3))


def push_ones(crowd: GroupInOneThread, times: int, seed: int = 0) -> list[Future[int]]:
    """Every user adds one to everything that many times, with pulls in between; the futures of the pushes."""
    chance = random.Random(seed)
    ones = like(crowd.initial, 1)
    todo = [user for user in crowd.users for _ in range(times)]
    chance.shuffle(todo)
    pushes, pulls = [], []
    for user in todo:
        if chance.random() < 0.3:
            future, pulled = user.push_pull(ones)
            pulls.append((future, pulled))
        else:
            future = user.push(ones)
        pushes.append(future)
        if chance.random() < 0.3:
            pulls.append(user.pull())
        for _ in range(chance.randrange(4)):
            crowd.turn()
    crowd.network.run_until(
        lambda: all(f.done() for f in pushes + [f for f, _ in pulls]), "pushes and pulls"
    )
    for future, pulled in pulls:
        assert values(pulled) == {future.result()}
    return pushes


def check_ones(crowd: GroupInOneThread, pushes: Sequence[Future[int]], user: int = 0) -> None:
    """Each made a version of its own, and was applied just once."""
    assert sorted(push.result() for push in pushes) == list(range(1, len(pushes) + 1))
    assert crowd.value(user) == len(pushes)
    crowd.settle()
    assert crowd.idle()


# -- exactly once ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", INITIAL)
@some
@given(size=crowds, shuffle=SEEDS)
def test_ones_that_users_push_add_up_to_their_number(
    kind: str, size: tuple[int, int], shuffle: int
) -> None:
    crowd = GroupInOneThread(INITIAL[kind](), *size, shuffle=shuffle)
    check_ones(crowd, push_ones(crowd, 4, shuffle))


@pytest.mark.long
@some
@given(size=crowds, shuffle=SEEDS)
def test_messages_that_come_twice_count_once(size: tuple[int, int], shuffle: int) -> None:
    crowd = GroupInOneThread(None, *size, shuffle=shuffle)
    crowd.network.filter = twice
    check_ones(crowd, push_ones(crowd, 3, shuffle))


@pytest.mark.long
@some
@given(size=crowds, shuffle=SEEDS)
def test_pushes_that_are_replayed_count_once(size: tuple[int, int], shuffle: int) -> None:
    crowd = GroupInOneThread(None, *size, shuffle=shuffle)
    crowd.network.filter = replayed = Replayed(shuffle)
    check_ones(crowd, push_ones(crowd, 6, shuffle))
    assert replayed.count > 5


@some
@given(size=crowds, shuffle=SEEDS)
def test_messages_may_be_late_and_chunks_come_in_any_order(
    size: tuple[int, int], shuffle: int
) -> None:
    crowd = GroupInOneThread(None, *size, shuffle=shuffle)
    crowd.network.filter = Reordered(crowd, shuffle)
    crowd.network.latency = late(shuffle)
    check_ones(crowd, push_ones(crowd, 4, shuffle))


def test_more_servers_than_chunks_do_no_harm() -> None:
    crowd = GroupInOneThread(np.zeros(3), 3, 2)
    assert crowd.group.owners == (0,)
    check_ones(crowd, push_ones(crowd, 3))
    crowd.users[1].die()
    crowd.settle()
    assert crowd.idle()


@some
@given(shuffle=SEEDS)
def test_pushes_of_one_user_are_committed_in_its_order(shuffle: int) -> None:
    crowd = GroupInOneThread(shuffle=shuffle)
    pushes = [[user.push(like(zeros(), 1)) for _ in range(5)] for user in crowd.users]
    crowd.network.run_until(lambda: all(f.done() for own in pushes for f in own), "pushes")
    for own in pushes:
        assert [f.result() for f in own] == sorted(f.result() for f in own)


# -- what is seen ------------------------------------------------------------------------------------


@pytest.mark.long
@some
@given(shuffle=SEEDS)
def test_a_push_that_is_done_is_seen_by_every_later_pull_of_anybody(shuffle: int) -> None:
    crowd = GroupInOneThread(None, 3, 3, shuffle=shuffle)
    chance = random.Random(shuffle)
    ones = like(zeros(), 1)
    noise = [user.push(ones) for user in crowd.users for _ in range(3)]
    for _ in range(6):
        version = crowd.wait(chance.choice(crowd.users).push(ones))
        seen, pulled = crowd.pull(chance.randrange(3))
        assert seen >= version
        assert values(pulled) == {seen}
        partial, piece = chance.choice(crowd.users).pull(["b"], (2, 5))
        assert crowd.wait(partial) >= seen
        assert values(piece) == {partial.result()}
    assert crowd.wait(crowd.users[0].client.counters()).version == 6 + sum(f.done() for f in noise)


@pytest.mark.long
@some
@given(shuffle=SEEDS, adding=st.lists(st.integers(1, 9), min_size=4, max_size=12))
def test_push_and_pull_at_once_shows_just_the_version_of_the_push(
    shuffle: int, adding: list[int]
) -> None:
    crowd = GroupInOneThread(None, 3, 3, shuffle=shuffle)
    added = {}
    for number, value in enumerate(adding):
        user = crowd.users[number % 3]
        if number % 2:
            added[user.push(like(zeros(), value))] = value, None
        else:
            future, pulled = user.push_pull(like(zeros(), value))
            added[future] = value, pulled
    crowd.network.run_until(lambda: all(f.done() for f in added), "pushes")
    total = 0
    for future in sorted(added, key=Future.result):
        value, pulled = added[future]
        total += value
        assert pulled is None or values(pulled) == {total}


def test_a_partial_pull_moves_only_the_chunks_that_are_needed() -> None:
    crowd = GroupInOneThread()
    crowd.wait(crowd.users[0].push(like(zeros(), 1)))
    moved: list[tuple[int, int]] = []

    def see(message: Message) -> list[Message]:
        if message.kind is Kind.WEIGHTS:
            assert message.payload is not None
            moved.append((message.body.chunk, message.payload.nbytes))
        return [message]

    crowd.network.filter = see
    layout = crowd.arrays.layout
    for names, span, shape in [
        (["n"], None, (2,)), (["a"], None, (5, 3)), (["b"], None, (7,)), (["none"], None, (0, 4)), ([], None, None),
        (["a"], (0, 1), (1,)), (["a"], (14, 15), (1,)), (["b"], (3, 7), (4,)), (["a", "n"], None, (5, 3)),
        (None, None, (5, 3)),
    ]:  # fmt: skip
        moved.clear()
        future, pulled = crowd.users[1].pull(names, span)
        assert crowd.wait(future) == 1
        crowd.settle()
        chosen = list(zeros()) if names is None else names
        assert values(pulled) == ({1} if chosen not in ([], ["none"]) else set())
        if shape is not None:
            assert tuple((pulled if span else pulled[chosen[0]]).shape) == shape
        begin, end = span or (0, 99)
        needed = {
            chunk.index
            for chunk in layout.chunks
            for piece in chunk.slices
            if layout.entries[piece.entry].name in chosen
            and piece.start < end
            and begin < piece.stop
        }
        assert sorted(moved) == [(index, layout.chunks[index].nbytes) for index in sorted(needed)]


# -- partial pushes ----------------------------------------------------------------------------------


@some
@given(
    shuffle=SEEDS, chosen=st.lists(st.sets(st.sampled_from(list(zeros()))), min_size=1, max_size=8)
)
def test_what_a_push_leaves_out_stays_as_it_is(shuffle: int, chosen: list[set[str]]) -> None:
    crowd = GroupInOneThread(shuffle=shuffle)
    pushes = [
        crowd.users[i % 2].push(like({n: zeros()[n] for n in names}, 1))
        for i, names in enumerate(chosen)
    ]
    crowd.network.run_until(lambda: all(f.done() for f in pushes), "pushes")
    version, pulled = crowd.pull()
    assert version == len(chosen)  # an empty one too makes a version
    for name, array in pulled.items():
        assert values(array) <= {sum(name in names for names in chosen)}
    crowd.settle()
    assert crowd.idle()


@pytest.mark.few(1)
@pytest.mark.parametrize("partial", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@some
@given(shuffle=SEEDS)
def test_an_optimizer_on_servers_equals_torch_in_the_order_of_versions(
    name: str, partial: bool, shuffle: int
) -> None:
    chance = random.Random(shuffle)
    generator = torch.Generator().manual_seed(shuffle % 1000)
    shapes = {"a": (5, 3), "b": (7,), "c": (4, 4)}
    initial = {
        n: torch.randn(shape, generator=generator, dtype=torch.float64)
        for n, shape in shapes.items()
    }
    crowd = GroupInOneThread(initial, 3, 3, shuffle=shuffle, optimizer=OPTIMIZERS[name])
    gradients = []
    for _ in range(9):
        names = [n for n in shapes if not partial or chance.random() < 0.6]
        gradients.append(
            {n: torch.randn(shapes[n], generator=generator, dtype=torch.float64) for n in names}
        )
    pushes = [crowd.users[number % 3].push(gradient) for number, gradient in enumerate(gradients)]
    crowd.network.run_until(lambda: all(f.done() for f in pushes), "pushes")
    parameters = {n: torch.nn.Parameter(value.clone()) for n, value in initial.items()}
    optimizer = OPTIMIZERS[name](list(parameters.values()))
    for number in sorted(range(9), key=lambda n: pushes[n].result()):
        for n, parameter in parameters.items():
            parameter.grad = gradients[number].get(n)
        optimizer.step()
    _, pulled = crowd.pull()
    for n, parameter in parameters.items():
        torch.testing.assert_close(pulled[n], parameter.detach(), rtol=1e-9, atol=1e-12)


# -- not finite --------------------------------------------------------------------------------------


def spoiled(where: str, value: float) -> Any:
    update = like(zeros(), 1)
    update[where].reshape(-1)[-1] = value
    return update


@pytest.mark.few(1)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["a", "b"])
@some
@given(shuffle=SEEDS)
def test_an_update_that_is_not_finite_is_refused_and_named(
    where: str, value: float, shuffle: int
) -> None:
    crowd = GroupInOneThread(shuffle=shuffle)
    ones = like(zeros(), 1)
    user, other = crowd.users
    good = [user.push(ones), other.push(ones)]
    bad = [user.push(spoiled(where, value)), user.push_pull(spoiled(where, value))[0]]
    good += [user.push(ones), other.push(ones), user.push(ones)]
    crowd.network.run_until(lambda: all(f.done() for f in good + bad), "pushes")
    for future in bad:
        with pytest.raises(NonFiniteError, match=f"'{where}' holds NaN or infinity"):
            future.result()
    check_ones(crowd, good)


def test_every_array_that_is_not_finite_is_named_and_one_by_itself_as_the_array() -> None:
    crowd = GroupInOneThread(nonfinite="refuse")
    update = spoiled("a", np.nan) | {"b": spoiled("b", np.inf)["b"]}
    with pytest.raises(NonFiniteError) as caught:
        crowd.wait(crowd.users[0].push(update))
    assert "'a'" in str(caught.value)
    assert "'b'" in str(caught.value)
    single = GroupInOneThread(np.zeros(20))
    with pytest.raises(NonFiniteError, match="of it applied: the array holds NaN"):
        single.wait(single.users[0].push(np.full(20, np.nan)))


def test_finite_values_whose_squares_overflow_are_finite() -> None:
    crowd = GroupInOneThread({"a": np.zeros(20), "b": np.zeros(9, dtype=np.float16)})
    huge = {"a": np.full(20, 1e300), "b": np.full(9, 6e4, dtype=np.float16)}
    assert crowd.wait(crowd.users[0].push(huge)) == 1
    _, pulled = crowd.pull()
    assert values(pulled["a"]) == {1e300}


@pytest.mark.parametrize("optimizer", [None, OPTIMIZERS["sgd"]])
def test_a_refused_update_leaves_arrays_and_optimizer_as_they_were(optimizer: Any) -> None:
    crowd = GroupInOneThread({"a": np.zeros(20), "b": np.zeros(9)}, optimizer=optimizer)
    user = crowd.users[0]
    crowd.wait(user.push({"a": np.ones(20), "b": np.ones(9)}))
    before = crowd.state()
    refused = [
        user.push({"a": np.ones(20), "b": np.full(9, np.nan)}),
        user.push({"a": np.full(20, np.inf)}),
    ]
    crowd.network.run_until(lambda: all(f.done() for f in refused), "pushes")
    assert all(isinstance(f.exception(), NonFiniteError) for f in refused)
    after = crowd.state()
    assert before.version == after.version == 1
    assert torch.equal(before.weights, after.weights)
    assert len(before.records) == len(after.records) == (0 if optimizer is None else 5)
    assert all(
        torch.equal(b, a) for (*_, b), (*_, a) in zip(before.records, after.records, strict=True)
    )


@some
@given(shuffle=SEEDS)
def test_an_update_that_is_not_finite_may_be_skipped_and_makes_a_version_that_changes_nothing(
    shuffle: int,
) -> None:
    crowd = GroupInOneThread(shuffle=shuffle, nonfinite="skip")
    good = [user.push(like(zeros(), 1)) for user in crowd.users for _ in range(3)]
    future, pulled = crowd.users[1].push_pull(spoiled("a", np.nan))
    good += [user.push(like(zeros(), 1)) for user in crowd.users]
    crowd.network.run_until(lambda: all(f.done() for f in [*good, future]), "pushes")
    assert values(pulled) == {sum(f.result() < future.result() for f in good)}
    version, pulled = crowd.pull()
    assert (version, values(pulled)) == (len(good) + 1, {len(good)})
    assert crowd.wait(crowd.users[0].client.counters()).skipped == 1


def test_an_update_that_is_not_finite_may_be_passed_on() -> None:
    crowd = GroupInOneThread(nonfinite="pass")
    assert crowd.wait(crowd.users[0].push(spoiled("b", np.inf))) == 1
    assert crowd.wait(crowd.users[0].push(spoiled("a", np.nan))) == 2
    _, pulled = crowd.pull()
    assert values(pulled["b"]) == {2, np.inf}
    assert np.isnan(pulled["a"][-1, -1])
    assert values(pulled["n"]) == {2}
    assert np.isfinite(pulled["a"].reshape(-1)[:-1]).all()


# -- users that die ----------------------------------------------------------------------------------


@some
@given(size=crowds, shuffle=SEEDS)
def test_what_a_user_had_sent_when_it_died_is_committed(
    size: tuple[int, int], shuffle: int
) -> None:
    crowd = GroupInOneThread(None, size[0], 1, shuffle=shuffle)
    watcher = crowd.join()
    for _ in range(size[1]):
        user = crowd.join()
        for number in range(3):
            user.push(like(zeros(), 1)) if number else user.push_pull(like(zeros(), 1))
        user.die()
    crowd.settle()
    assert crowd.value() == 3 * size[1]
    crowd.settle()
    assert crowd.idle()
    assert crowd.wait(watcher.push(like(zeros(), 1))) == crowd.value()


def test_a_push_that_reached_one_server_only_is_not_applied_and_its_memory_is_freed() -> None:
    crowd = GroupInOneThread()
    user, other = crowd.users
    crowd.network.filter = lambda m: (
        [] if m.kind is Kind.PUSH and m.target == ("server", 1) else [m]
    )
    user.push(like(zeros(), 1))
    crowd.settle()
    assert not crowd.idle()  # the other servers hold it
    user.die()
    crowd.network.filter = lambda message: [message]
    crowd.settle()
    assert crowd.idle()
    pushes = [other.push(like(zeros(), 1)) for _ in range(2)]
    crowd.network.run_until(lambda: all(f.done() for f in pushes), "pushes")
    check_ones(crowd, pushes, 1)


class Cut:
    """Of what some users send, only so many messages leave on each of their channels."""

    def __init__(self, limits: dict[tuple[int, int], int]) -> None:
        self._limits = limits

    def __call__(self, message: Message) -> list[Message]:
        assert message.source is not None
        assert message.target is not None
        channel = (
            message.source.index,
            message.target.index,
        )  # the coordinator lives with server 0
        left = self._limits.get(channel)
        if left is None or message.source.role != "worker":
            return [message]
        self._limits[channel] = left - 1
        return [message] if left > 0 else []


@pytest.mark.long
@runs(100)
@given(
    shuffle=SEEDS,
    limits=st.fixed_dictionaries(
        {(FIRST + u, s): st.integers(0, 12) for u in range(2) for s in range(3)}
    ),
    slow=st.booleans(),
    turns=st.integers(0, 30),
)
def test_users_that_die_at_any_moment_leave_every_chunk_at_one_value_and_nothing_else(
    shuffle: int, limits: dict[tuple[int, int], int], slow: bool, turns: int
) -> None:
    crowd = GroupInOneThread(None, 3, 3, shuffle=shuffle)
    if slow:
        crowd.network.latency = late(shuffle)
    crowd.network.filter = Cut(limits)
    ones = like(zeros(), 1)
    doomed, lasting = crowd.users[:2], crowd.users[2]
    theirs = [[user.push(ones) for _ in range(3)] for user in doomed]
    mine = [lasting.push(ones) for _ in range(3)]
    for _ in range(turns):
        crowd.turn()
    for user in doomed:
        user.die()
    crowd.network.run_until(lambda: all(f.done() for f in mine), "the pushes of who lives")
    crowd.settle()
    value = crowd.value(2)
    known = {f.result() for own in theirs for f in own if f.done() and f.exception() is None}
    assert 3 <= value <= 9
    assert max({f.result() for f in mine} | known) <= value
    assert not known & {f.result() for f in mine}
    crowd.settle()
    assert crowd.idle()
    assert crowd.wait(lasting.push(ones)) == value + 1 == crowd.value(2)


def test_a_user_that_is_gone_is_forgotten() -> None:
    crowd = GroupInOneThread()
    for _ in range(3):
        crowd.wait(crowd.users[1].push(like(zeros(), 1)))
    crowd.settle()
    kept = [crowd.coordinator, *crowd.servers]
    assert all(FIRST + 1 in remembered_by(each) for each in kept)
    crowd.users[1].die()
    crowd.settle()
    assert not any(map(remembered_by, kept))
    assert crowd.idle()


def test_a_payload_that_was_cut_off_keeps_no_memory() -> None:
    crowd = GroupInOneThread()
    server = crowd.servers[1]
    (held,) = server.chunks.values()
    for sequence in range(1, 20):  # the memory was asked for, but no message came of it
        server.destination(
            said(Kind.PUSH, sequence=sequence, chunk=held.chunk.index), held.chunk.nbytes
        )
    check_ones(crowd, push_ones(crowd, 3))
    assert buffers_of(server) <= 6


@pytest.mark.parametrize("server", [0, 2])
def test_the_loss_of_a_server_fails_what_waits_and_what_comes(server: int) -> None:
    crowd = GroupInOneThread()
    user = crowd.users[0]
    crowd.wait(user.push(like(zeros(), 1)))
    waiting: list[Future[Any]] = [
        user.client.counters(),
        user.push(like(zeros(), 1)),
        user.pull()[0],
    ]
    user.links[server].other.close()
    crowd.network.run_until(lambda: all(f.done() for f in waiting), "the loss")
    waiting += [user.push(like(zeros(), 1)), user.pull()[0]]
    assert len({id(f.exception()) for f in waiting[1:]}) == 4  # none is raised twice
    waiting.append(user.client.read("weights"))
    for future in waiting:
        with pytest.raises(PeerLostError, match=f"server {server}"):
            future.result(0)
    assert user.pusher.pushing == 0
    assert crowd.wait(crowd.users[1].push(like(zeros(), 1))) >= 2


def test_nothing_waits_once_it_is_closed() -> None:
    user = GroupInOneThread().users[0]
    waiting: list[Future[Any]] = [
        user.push(like(zeros(), 1)),
        user.pull()[0],
        user.push_pull(like(zeros(), 1))[0],
    ]
    user.pusher.close("it is shut down")
    for future in [*waiting, user.push(like(zeros(), 1)), user.pull()[0]]:
        with pytest.raises(ShutdownError, match="it is shut down"):
            future.result(0)


def test_a_push_in_flight_cannot_be_cancelled() -> None:
    crowd = GroupInOneThread()
    push, (pull, _) = crowd.users[0].push(like(zeros(), 1)), crowd.users[0].pull()
    assert not push.cancel()
    assert not pull.cancel()
    assert crowd.wait(push) == 1
    assert crowd.wait(pull) in (0, 1)
