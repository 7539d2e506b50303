"""State of a parameter server, read and put back whole, whoever else is at work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.messages.message import Kind, Message, Peer
from steepest.testing.inspection import puts_of
from tests.group_in_one_thread import FIRST, OPTIMIZERS, GroupInOneThread, like, values, zeros
from tests.random_examples import SEEDS, runs

some = runs(20)


def gradient(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(size, generator=generator, dtype=torch.float64)
        for n, size in (("a", 19), ("b", 5))
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [None, OPTIMIZERS["sgd"], OPTIMIZERS["adam"]])
@some
@given(shuffle=SEEDS, servers=st.integers(1, 3))
def test_state_put_into_other_servers_goes_on_as_here(
    optimizer: Any, shuffle: int, servers: int
) -> None:
    here = GroupInOneThread(gradient(0), 2, 1, shuffle=shuffle, optimizer=optimizer)
    for number in range(3):
        here.wait(here.users[0].push(gradient(number)))
    saved = here.state()
    assert saved.version == 3
    there = GroupInOneThread(gradient(7), servers, 2, shuffle=shuffle + 1, optimizer=optimizer)
    there.wait(there.users[1].push(gradient(9)))
    position = there.wait(there.users[0].client.install(0, saved.weights, saved.records))
    assert position.version == 2  # an update of its own
    for crowd in (here, there):
        crowd.wait(crowd.users[0].push(gradient(3)))
    assert torch.equal(here.state().weights, there.state().weights)


@some
@given(shuffle=SEEDS, turns=st.integers(0, 30))
def test_state_put_while_pushes_are_in_flight_loses_none_of_them(shuffle: int, turns: int) -> None:
    crowd = GroupInOneThread(None, 3, 3, shuffle=shuffle)
    weights = crowd.arrays.layout.allocate()
    crowd.arrays.layout.write(
        weights, {name: torch.as_tensor(array) for name, array in like(zeros(), 1000).items()}
    )
    ones = like(zeros(), 1)
    pushes = [user.push(ones) for user in crowd.users for _ in range(3)]
    for _ in range(turns):
        crowd.turn()
    install = crowd.users[0].client.install(0, weights, [])
    pulls = [user.pull() for user in crowd.users]
    pushes += [user.push(ones) for user in crowd.users]
    crowd.network.run_until(
        lambda: all(f.done() for f in [install, *pushes, *(p for p, _ in pulls)]), "everything"
    )
    at = install.result().version
    for future, pulled in [*pulls, crowd.users[1].pull()]:
        version = crowd.wait(future)
        assert values(pulled) == {version if version < at else 1000 + version - at}
    assert sorted([at, *(f.result() for f in pushes)]) == list(range(1, 14))
    crowd.settle()
    assert crowd.idle()


@runs(60)
@given(shuffle=SEEDS, turns=st.integers(0, 10))
def test_of_states_put_by_two_at_once_one_is_there_in_the_end_and_whole(
    shuffle: int, turns: int
) -> None:
    crowd = GroupInOneThread(None, 3, 2, shuffle=shuffle)
    installs = []
    for user, value in zip(crowd.users, (100, 200), strict=True):
        weights = crowd.arrays.layout.allocate()
        full = {name: torch.as_tensor(array) for name, array in like(zeros(), value).items()}
        crowd.arrays.layout.write(weights, full)
        installs.append(user.client.install(0, weights, []))
        for _ in range(turns):
            crowd.turn()
    crowd.network.run_until(lambda: all(f.done() for f in installs), "both")
    versions = [f.result().version for f in installs]
    assert sorted(versions) == [1, 2]
    version, pulled = crowd.pull()
    assert version == 2
    assert values(pulled) == {100 if versions[0] == 2 else 200}


@some
@given(shuffle=SEEDS, cut=st.integers(0, 8))
def test_a_state_that_was_put_in_part_only_is_not_installed_and_not_kept(
    shuffle: int, cut: int
) -> None:
    crowd = GroupInOneThread(None, 3, 2, shuffle=shuffle)
    leaving, other = crowd.users
    weights = torch.full_like(crowd.arrays.layout.allocate(), 7)
    left = cut

    def see(message: Message) -> list[Message]:
        nonlocal left
        left -= message.kind in (Kind.PUT, Kind.PUT_STATE, Kind.REPLACE_STATE)
        return [message] if left >= 0 or message.source != Peer("client", FIRST) else []

    crowd.network.filter = see
    leaving.client.install(0, weights, [])
    crowd.settle()
    leaving.die()
    crowd.settle()
    whole = (
        cut >= len(crowd.arrays.layout.chunks) + 3
    )  # every chunk, and a word on optimizer state to each server
    assert crowd.wait(other.push(like(zeros(), 1))) == 1 + whole
    if not whole:
        assert crowd.value(1) == 1
    put = crowd.wait(other.client.install(0, crowd.arrays.layout.allocate(), []))
    assert crowd.pull(1)[0] == put.version
    assert values(crowd.pull(1)[1]) == {0}
    crowd.settle()
    assert not any(map(puts_of, crowd.servers))


def test_a_request_that_was_never_whole_is_forgotten_with_the_next_one() -> None:
    crowd = GroupInOneThread()
    weights = crowd.arrays.layout.allocate()
    crowd.network.filter = lambda m: (
        [] if m.kind is Kind.PUT and m.target == Peer("server", 1) else [m]
    )
    crowd.users[0].client.install(0, weights, [])
    crowd.settle()
    crowd.network.filter = lambda message: [message]
    assert any(map(puts_of, crowd.servers))
    crowd.wait(crowd.users[0].client.install(0, weights, []))
    crowd.settle()
    assert not any(map(puts_of, crowd.servers))


def test_who_takes_the_place_of_one_that_left_is_taken_for_another() -> None:
    crowd = GroupInOneThread()
    for value in (5, 6):
        weights = crowd.arrays.layout.allocate()
        full = {name: torch.as_tensor(array) for name, array in like(zeros(), value).items()}
        crowd.arrays.layout.write(weights, full)
        user = crowd.join(FIRST + 7)
        crowd.network.filter = lambda m: (
            [] if m.kind is Kind.PUT and m.target == Peer("server", 1) else [m]
        )
        half = user.client.install(0, torch.zeros_like(weights), [])
        crowd.settle()
        crowd.network.filter = lambda message: [message]
        user.die()
        crowd.settle()
        assert not half.done()
        user = crowd.join(FIRST + 7)  # counts from one again
        crowd.wait(user.client.install(0, weights, []))
        assert values(crowd.pull()[1]) == {value}
        crowd.settle()
        user.die()
        crowd.settle()


@some
@given(shuffle=SEEDS)
def test_states_put_by_one_right_after_another_are_installed_in_turn_and_whole(
    shuffle: int,
) -> None:
    crowd = GroupInOneThread(None, 3, 2, shuffle=shuffle)
    putting, looking = crowd.users
    for value in range(5):
        weights = crowd.arrays.layout.allocate()
        full = {name: torch.as_tensor(array) for name, array in like(zeros(), value).items()}
        crowd.arrays.layout.write(weights, full)
        install = putting.client.install(0, weights, [])
        pulls = []
        while not install.done():
            if crowd.network.rounds % 8 == 0:
                pulls.append(looking.pull())
            crowd.turn()
        for future, pulled in pulls:
            assert crowd.wait(future) in (value, value + 1)
            assert values(pulled) == {max(future.result() - 1, 0)}
