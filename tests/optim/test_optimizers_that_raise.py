"""An optimizer of the user's that raises on a server is told once, as such, and the job goes back to a whole state."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from steepest import AllreduceStrategy, DistributedSGD, FailureConfig, ParameterServerStrategy
from steepest.core.messages.driver import Failure
from steepest.core.messages.message import server_peer, worker_peer
from steepest.core.strategies.strategy import Strategy
from steepest.errors import DeadlineError, ModelRaisedError, RemoteTraceback
from steepest.runtime.survivors import state_of
from steepest.strategies.simple import SimpleStrategy
from steepest.testing import InProcessCluster
from tests.group_in_one_thread import GroupInOneThread, values
from tests.living import places_of
from tests.reference import Task, difference, samples
from tests.simulation.run import Simulation, run_config
from tests.step_calls import PACKAGE
from tests.strikes import send_signal
from tests.unusual_optimizers import NoLuckError, Raising

STEPS, WORKERS = 12, 2


TASK = Task(
    optimizer=lambda module: Raising(module.parameters(), lr=0.1, momentum=0.9), data=samples(64)
)
STRATEGIES: dict[str, Strategy] = {
    "simple": SimpleStrategy(),
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "copies": ParameterServerStrategy(num_servers=2, chunk_bytes=64, replication=2),
    "allreduce": AllreduceStrategy(chunk_bytes=64),
    "groups": AllreduceStrategy(data_plane="gloo", chunk_bytes=64),
    "async": ParameterServerStrategy(num_servers=2, chunk_bytes=64, mode="async"),
}


@contextlib.contextmanager
def simulated(strategy: Strategy, snapshot_every: int) -> Iterator[DistributedSGD]:
    """A trainer in a simulation."""
    config = run_config(failure=FailureConfig(snapshot_every=snapshot_every))
    with (
        Simulation(1).running(),
        DistributedSGD(
            TASK.creator(), num_workers=WORKERS, strategy=strategy, run_config=config
        ) as trainer,
    ):
        yield trainer


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    before = Raising.before
    yield
    Raising.left.clear()
    Raising.before = before


@pytest.mark.parametrize("name", STRATEGIES)
def test_servers_of_an_update_made_in_part_send_no_weights_and_take_no_steps(name: str) -> None:
    cluster = InProcessCluster(TASK.creator(), num_workers=WORKERS, strategy=STRATEGIES[name])
    cluster.step(3)
    Raising.left.append(2)
    found: list[Failure] = []
    for _ in range(5):  # a step's result may come before its update raises
        last = cluster.step(1)[-1]
        found += [last] if isinstance(last, Failure) else []
    about = found[0]
    assert (about.reason, about.step) == ("optimizer", 5 if name == "simple" else 3)
    assert about.peer in [server_peer(0), server_peer(1)]
    assert about.error == "NoLuckError: no luck today"
    assert "in step" in about.traceback
    assert PACKAGE not in about.traceback
    assert {(each.reason, each.step, each.peer) for each in found[1:]} == {
        (about.reason, about.step, about.peer)
    }
    with pytest.raises(DeadlineError, match="optimizer raised in the update to version .*no luck"):
        cluster.snapshot("state")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "copies", "allreduce"])
def test_a_job_goes_back_to_its_snapshot_and_on_from_there(name: str) -> None:
    expected = TASK.trace(WORKERS, STEPS)
    with simulated(STRATEGIES[name], snapshot_every=1) as trainer:
        trainer.fit(steps=4, progress=False)
        Raising.left.append(2)
        with pytest.raises(
            ModelRaisedError, match=r"server \d on .*: the optimizer raised in step 5: NoLuck"
        ) as caught:
            trainer.fit(steps=STEPS - 4, progress=False)
        assert isinstance(caught.value, NoLuckError)
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "no luck today" in str(caught.value.__cause__)
        assert PACKAGE not in str(caught.value.__cause__)
        step = trainer._training.step
        assert step <= 5
        assert f"are those after step {step}" in str(caught.value)
        assert difference(trainer.weights(), expected[step]) < 1e-12
        trainer.fit(steps=STEPS - step, progress=False)
        assert difference(trainer.weights(), expected[STEPS]) < 1e-12
        stats = trainer.stats()
        assert (stats.replaced, [event.kind for event in stats.events]) == (0, ["changed"])


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["weights", "step", "evaluate", "set_weights"])
def test_between_calls_it_is_told_by_the_next_one_and_once(way: str) -> None:
    expected = TASK.trace(WORKERS, STEPS)
    with simulated(STRATEGIES["ps"], snapshot_every=1) as trainer:
        trainer.step()
        trainer._supervisor.snapshots.ensure()
        zeros = {name: torch.zeros_like(value) for name, value in trainer.weights().items()}
        Raising.left.append(1)
        trainer.step()  # the coordinator has committed it before servers apply it
        calls: dict[str, Callable[[], Any]] = {
            "weights": trainer.weights,
            "step": trainer.step,
            "evaluate": lambda: trainer.evaluate(TASK.data),
            "set_weights": lambda: trainer.set_weights(zeros),
        }
        with pytest.raises(ModelRaisedError, match="the optimizer raised in step 2: NoLuck"):
            calls[way]()
        step = trainer._training.step
        assert step < 2
        assert difference(trainer.weights(), expected[step]) < 1e-12
        trainer.fit(steps=STEPS - step, progress=False)
        assert difference(trainer.weights(), expected[STEPS]) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["simple", "ps", "copies", "allreduce"])
def test_without_a_snapshot_every_later_call_says_so(name: str) -> None:
    with simulated(STRATEGIES[name], snapshot_every=0) as trainer:
        trainer.step()
        Raising.left += [0, 0, 0, 0, 0, 0, 0, 0]  # copies too
        with pytest.raises(ModelRaisedError, match="no snapshot to go back to"):
            trainer.fit(steps=2, progress=False)
        for call in (trainer.step, trainer.weights, trainer.state_dict, trainer.step):
            with pytest.raises(ModelRaisedError, match="the optimizer raised in step 2: NoLuck"):
                call()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "copies", "allreduce"])
def test_a_process_may_die_at_the_same_time(name: str) -> None:
    expected = TASK.trace(WORKERS, STEPS)
    with simulated(STRATEGIES[name], snapshot_every=1) as trainer:
        trainer.fit(steps=4, progress=False)
        Raising.left.append(2)
        victim = places_of(trainer)[worker_peer(1)].pid
        Raising.before = lambda: send_signal(victim, signal.SIGKILL)
        told = False
        try:
            trainer.fit(steps=STEPS - 4, progress=False)
        except ModelRaisedError:  # not where all of it dies
            told = True
        lines = [event.line for event in trainer.stats().events]
        assert not told or not any("made again" in line for line in lines), lines
        step = trainer._training.step
        assert difference(trainer.weights(), expected[step]) < 1e-12
        if step < STEPS:
            trainer.fit(steps=STEPS - step, progress=False)
        assert difference(trainer.weights(), expected[STEPS]) < 1e-12


@pytest.mark.parametrize("replication", [1, 2])
def test_users_of_a_parameter_server_are_told_until_a_whole_state_is_loaded(
    replication: int,
) -> None:
    initial = {"a": np.zeros((5, 3)), "b": np.zeros(7)}
    crowd = GroupInOneThread(
        initial,
        2,
        2,
        optimizer=lambda parameters: Raising(parameters, lr=0.5, momentum=0.9),
        replication=replication,
    )
    one, other = crowd.users
    update = {name: np.ones_like(array) for name, array in initial.items()}
    for _ in range(3):
        crowd.wait(one.push(update))
    saved, expected = crowd.state(), crowd.pull()[1]
    Raising.left.append(0)
    told = "server [01]: its optimizer raised.*no luck today.*load_state_dict"
    crowd.wait(one.push(update))  # committed before it is applied
    for future in (one.push(update), one.push_pull(update)[0], other.push(update), other.pull()[0]):
        with pytest.raises(ModelRaisedError, match=told) as caught:
            crowd.wait(future)
        assert isinstance(caught.value, NoLuckError)
        assert "in step" in str(caught.value.__cause__)
    with pytest.raises(ModelRaisedError, match="server [01]: its optimizer raised") as caught:
        crowd.state()
    assert isinstance(caught.value, NoLuckError)
    crowd.settle()
    assert crowd.idle()
    crowd.wait(one.client.install(0, saved.weights, saved.records))
    assert all((crowd.pull()[1][name] == expected[name]).all() for name in initial)
    pulled = [crowd.wait(user.push_pull(update)[0]) for user in (one, other)]
    assert pulled[1] == pulled[0] + 1
    serial = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([serial], lr=0.5, momentum=0.9)
    for _ in range(5):
        serial.grad = torch.ones_like(serial)
        optimizer.step()
    assert values(crowd.pull()[1]) == {serial.item()}


def test_a_push_that_wants_the_arrays_of_the_update_that_raises_is_told() -> None:
    crowd = GroupInOneThread(
        np.zeros(20), 2, 1, optimizer=lambda parameters: Raising(parameters, lr=0.5, momentum=0.9)
    )
    crowd.wait(crowd.users[0].push(np.ones(20)))
    Raising.left.append(1)
    future, _ = crowd.users[0].push_pull(np.ones(20))
    with pytest.raises(ModelRaisedError, match="raised in the update to version 2: NoLuck"):
        crowd.wait(future)
    crowd.settle()
    assert crowd.idle()


def test_a_copy_that_did_not_raise_serves_when_a_server_dies() -> None:
    crowd = GroupInOneThread(
        np.zeros(20),
        3,
        1,
        replication=2,
        optimizer=lambda parameters: Raising(parameters, lr=0.5, momentum=0.9),
    )
    crowd.wait(crowd.users[0].push(np.ones(20)))
    assert all(state_of([server]).chunks for server in crowd.servers)
    Raising.left.append(0)
    crowd.wait(crowd.users[0].push(np.ones(20)))
    crowd.settle()
    (torn,) = [i for i, server in enumerate(crowd.servers) if server.torn is not None]
    assert not state_of([crowd.servers[torn]]).chunks
    crowd.replace(torn)
    version, pulled = crowd.pull()
    assert (version, values(pulled)) == (2, {-0.5 - 0.95})
