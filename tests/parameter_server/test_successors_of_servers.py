"""Parameter servers with copies: any one dies at any moment, and pushes are applied just once."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from steepest.core.messages.message import Kind
from steepest.errors import PeerLostError
from tests.group_in_one_thread import GroupInOneThread, like, values, zeros

PUSHES = 12


def test_a_push_is_answered_when_another_server_knows_it() -> None:
    initial = {"a": np.zeros(3)}  # one chunk, for which server 0 answers
    crowd = GroupInOneThread(initial, 2, 1, replication=2)
    (user,) = crowd.users
    late = [Kind.COMMIT, Kind.INSTALL_PUT]
    crowd.network.filter = lambda message: (
        [] if message.kind in late and message.target.index == 1 else [message]
    )
    wanted = [user.push(like(initial, 1)), user.push_pull(like(initial, 1))[0]]
    crowd.settle()
    assert crowd.coordinator.version == 2
    assert not any(future.done() for future in wanted), "server 0 alone knows these updates"
    crowd.replace(0)
    crowd.network.filter = lambda message: [message]
    assert [crowd.wait(future) for future in wanted] == [1, 2]
    assert crowd.value() == 2


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(12))
def test_whichever_server_dies_at_any_moment_each_push_is_applied_once(seed: int) -> None:
    rng = random.Random(seed)
    crowd = GroupInOneThread(servers=2 + seed % 2, users=3, replication=2, shuffle=seed)
    pushes: list[Future[int]] = []
    pulled: list[tuple[Future[int], Any]] = []
    done: dict[int, int] = {}

    def note() -> None:
        """What is acknowledged stays so."""
        done.update((n, future.result()) for n, future in enumerate(pushes) if future.done())

    for death in range(3):
        for user in crowd.users:
            for number in range(PUSHES // 3):
                if number % 2:
                    pushes.append(user.push(like(zeros(), 1)))
                else:
                    future, out = user.push_pull(like(zeros(), 1))
                    pushes.append(future)
                    pulled.append((future, out))
            pulled.append(user.pull())
        for _ in range(rng.randrange(60)):
            crowd.turn()
        note()
        crowd.replace(rng.randrange(crowd.group.num_servers))
        assert {n: pushes[n].result(0) for n in done} == done
        if death == 1:
            crowd.turn()
    for future in (*pushes, *(future for future, _ in pulled)):
        crowd.wait(future)
    assert crowd.value() == len(pushes) == 3 * PUSHES
    read = {future for future, _ in pulled}  # perhaps at a later version than that of the push
    alone = [future.result() for future in pushes if future not in read]
    assert len({*alone}) == len(alone)
    for future, out in pulled:
        assert values(out) == {future.result()}
    first, *others = [{c: held.weights for c, held in s.chunks.items()} for s in crowd.servers]
    for other in others:
        for chunk in first.keys() & other.keys():
            assert torch.equal(first[chunk], other[chunk])


def test_the_successor_has_the_optimizers_state() -> None:
    initial = {"w": np.zeros(40)}
    crowd = GroupInOneThread(
        initial, 2, 1, replication=2, optimizer=lambda parameters: torch.optim.Adam(parameters)
    )
    parameter = torch.nn.Parameter(torch.zeros(40, dtype=torch.float64))
    optimizer = torch.optim.Adam([parameter])
    for step in range(6):
        gradient = np.linspace(-1, step, 40)
        crowd.wait(crowd.users[0].push({"w": gradient}))
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        if step % 2:
            crowd.replace(step % 4 // 2)
    version, pulled = crowd.pull()
    assert version == 6
    assert np.allclose(pulled["w"], parameter.detach().numpy(), rtol=1e-12, atol=0)


def test_a_state_that_was_installed_outlives_the_coordinator() -> None:
    crowd = GroupInOneThread(servers=2, users=1, replication=2)
    layout = crowd.arrays.layout
    weights = layout.allocate()
    names = {entry.name for entry in layout.entries}
    kept = {name: torch.as_tensor(array) for name, array in like(zeros(), 7).items()}
    layout.write(weights, {name: kept[name] for name in names})
    crowd.wait(crowd.users[0].client.install(0, weights, []))
    crowd.replace(0)
    crowd.wait(crowd.users[0].push(like(zeros(), 1)))
    version, pulled = crowd.pull()
    assert (version, values(pulled)) == (2, {8})


def test_a_push_whose_caller_has_given_up_is_not_sent_again() -> None:
    crowd = GroupInOneThread(servers=2, users=1, replication=2)
    (user,) = crowd.users
    crowd.network.filter = lambda message: [] if message.kind is Kind.PUSH else [message]
    future = user.push(like(zeros(), 1))
    crowd.settle()
    user.pusher.withdraw(future)
    crowd.network.filter = lambda message: [message]
    crowd.replace(1)
    crowd.settle()
    with pytest.raises(PeerLostError, match="given up"):
        future.result(0)
    assert crowd.value() == 0
    assert user.pusher.pushing == 0
