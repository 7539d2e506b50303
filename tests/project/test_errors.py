"""What goes wrong on Ray, and what the user is told."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from steepest import (
    AllreduceStrategy,
    Callback,
    DeadlineConfig,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    SimpleStrategy,
    StepResult,
    TorchModel,
)
from steepest.core.engine.job import ModelCreator
from steepest.core.messages.message import Peer
from steepest.core.strategies.strategy import Strategy
from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    ModelError,
    ModelRaisedError,
    NonFiniteError,
    PeerLostError,
    ResourcesError,
    ShutdownError,
    StepError,
)
from steepest.strategies.named import as_strategy
from steepest.testing import InProcessCluster, linear_model_creator
from tests.living import places_of
from tests.reference import same_bits, samples

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

Creator = Callable[..., ModelCreator]


class Faulty(TorchModel):
    """Linear regression with a fault that can be switched on."""

    fault = ""

    def loss(self, batch: Any) -> torch.Tensor:
        print("computing", type(self).__name__, flush=True)  # noqa: T201 - among the last lines of the dead
        if self.fault == "raise":
            raise ArithmeticError("the user's own complaint")
        if self.fault == "hang":
            threading.Event().wait(60)
        result = super().loss(batch)
        assert isinstance(result, torch.Tensor)
        if self.fault == "nan":
            return result + self.module.bias[0] * float("nan")
        return result


def creator() -> ModelCreator:
    def create(worker_index: int, device_index: int) -> Faulty:
        return Faulty(
            nn.Linear(3, 2).double(),
            loss=nn.functional.mse_loss,
            data=samples(16),
            batch_size=2,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        )

    return create


def set_fault(sgd: DistributedSGD, worker: int, fault: str) -> None:
    """Switches a worker's fault on ("" switches it off)."""

    def switch(view: Any) -> None:
        if view.index == worker:
            for model in view.models:
                model.fault = fault

    sgd.foreach_worker(switch)


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, do: Callable[[], Any]) -> None:
        self.step = step
        self.do = do
        self.last = 0

    def on_step(self, sgd: Any, result: StepResult) -> None:
        self.last = result.step
        if result.step == self.step:
            self.do()


# -- arguments -------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_before_anything_is_started() -> None:
    good = linear_model_creator()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "psx"}, r"strategy='psx'.*'simple', 'ps'"),
        ({"strategy": 3}, r"strategy=3.*'simple', 'ps'"),
        ({"num_workers": 0}, "num_workers=0: give an integer of at least 1"),
        ({"num_workers": 1.5}, "num_workers=1.5"),
        ({"devices_per_worker": 0}, "devices_per_worker=0"),
        ({"seed": -1}, "seed=-1"),
        (
            {"strategy": ParameterServerStrategy(backup_workers=2), "num_workers": 2},
            "backup_workers=2 with num_workers=2",
        ),
        ({"model_creator": "ConvNet"}, r"model_creator='ConvNet'.*worker_index, device_index"),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            DistributedSGD(**{"model_creator": good, **arguments})


def test_a_model_creator_that_cannot_travel_is_refused() -> None:
    lock = threading.Lock()

    def create(worker_index: int, device_index: int) -> Any:
        return lock

    with pytest.raises(ConfigurationError, match="model_creator.*lock"):
        DistributedSGD(create)


# -- starting --------------------------------------------------------------------------------------


def test_more_workers_than_the_cluster_can_place() -> None:
    with pytest.raises(
        ResourcesError, match=r"9 workers never fit: asked \{CPU: 9\}.*has is \{CPU: 8"
    ):
        DistributedSGD(linear_model_creator(), num_workers=9)


def test_a_model_creator_that_raises() -> None:
    def create(worker_index: int, device_index: int) -> Any:
        if worker_index == 1:
            raise FileNotFoundError("no such weights file")  # the line that the user must see
        return linear_model_creator()(worker_index, device_index)

    with pytest.raises(ModelRaisedError, match="FileNotFoundError: no such weights file") as caught:
        DistributedSGD(create, num_workers=2)
    assert "the line that the user must see" in str(caught.value.__cause__)


def test_a_model_creator_that_returns_no_model() -> None:
    with pytest.raises(
        ModelError, match=r"model_creator\(0, 0\) returned Linear: return a steepest model"
    ):
        DistributedSGD(lambda worker_index, device_index: nn.Linear(1, 1))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("workers", "devices", "other"), [(2, 1, "worker 1"), (1, 2, "worker 0 device 1")]
)
def test_replicas_that_disagree(workers: int, devices: int, other: str) -> None:
    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            nn.Linear(3 + worker_index + device_index, 2),
            loss=nn.functional.mse_loss,
            data=samples(8),
            batch_size=2,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )

    with pytest.raises(
        ModelError, match=rf"'weight' has shape \(2, 3\), the other has \(2, 4\) \({other}\)"
    ):
        DistributedSGD(create, workers, devices)


# -- a step that fails ------------------------------------------------------------------------------

PS = ParameterServerStrategy(num_servers=2, chunk_bytes=32)
ALLREDUCE = AllreduceStrategy(chunk_bytes=32)


@pytest.fixture(scope="module", params=[PS, SimpleStrategy()], ids=["ps", "simple"])
def shared(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[DistributedSGD]:
    with DistributedSGD(creator(), num_workers=2, strategy=request.param) as sgd:
        yield sgd


def test_a_model_that_raises_in_a_step(shared: DistributedSGD) -> None:
    shared.fit(steps=3, progress=False)
    before, at = shared.weights(), shared.stats().step
    set_fault(shared, 1, "raise")
    with pytest.raises(
        ModelRaisedError, match=rf"worker 1 on .*step {at + 1}: ArithmeticError: the user's"
    ) as caught:
        shared.fit(steps=5, progress=False)
    assert 'raise ArithmeticError("the user\'s own complaint")' in str(caught.value.__cause__)
    assert same_bits(shared.weights(), before)
    set_fault(shared, 1, "")
    assert shared.step().step == at + 1
    assert not same_bits(shared.weights(), before)


def test_a_gradient_that_is_not_finite(shared: DistributedSGD) -> None:
    before, at = shared.weights(), shared.stats().step
    set_fault(shared, 0, "nan")
    with pytest.raises(
        NonFiniteError, match=rf"step {at + 1}: the gradient of 'bias' of worker 0 holds NaN"
    ):
        shared.step()
    assert same_bits(shared.weights(), before)
    set_fault(shared, 0, "")
    assert shared.step().step == at + 1


def test_a_function_that_raises_on_the_workers(shared: DistributedSGD) -> None:
    def fails(_: Any) -> None:
        raise KeyError("nothing here")

    for each in (shared.foreach_worker, shared.foreach_model, shared.for_model):
        with pytest.raises(ModelRaisedError, match="KeyError: 'nothing here'") as caught:
            each(fails)
        assert 'raise KeyError("nothing here")' in str(caught.value.__cause__)
    at = shared.stats().step
    assert shared.step().step == at + 1


@pytest.mark.parametrize(
    "shared", [PS], ids=["ps"], indirect=True
)  # under simple no process listens
def test_strangers_at_the_door_are_refused_and_counted(shared: DistributedSGD) -> None:
    import ray

    server = shared._live().actors[Peer("server", 0)]

    def door(process: Any) -> tuple[str, int]:
        listener = next(
            sock for sock in process._transport._listeners if sock.family == socket.AF_INET
        )
        return listener.getsockname()

    address = ray.get(server.__ray_call__.remote(door))
    before = shared.stats()
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 100,
        b"steepest/1\n" + b"\xff" * 100,
    ):
        with socket.create_connection(address, timeout=10) as stranger:
            stranger.sendall(garbage)
            try:
                while stranger.recv(4096):
                    pass  # until the server closes
            except ConnectionError:
                pass
    assert shared.fit(steps=5, progress=False).step == before.step + 5
    assert shared.stats().refused == before.refused + 3


# -- a process that dies ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ps", "simple"])
def test_a_worker_that_is_killed(strategy: str) -> None:
    sgd = DistributedSGD(
        creator(),
        num_workers=2,
        strategy=strategy,
        run_config=RunConfig(failure=FailureConfig(max_failures=0)),
    )
    pids = sgd.foreach_worker(lambda view: view.pid)
    kill = At(5, lambda: os.kill(pids[1], signal.SIGKILL))
    with pytest.raises(
        PeerLostError, match=rf"worker 1 on .* \(node [0-9a-f]+, pid {pids[1]}\) died: "
    ) as caught:
        sgd.fit(steps=1_000_000, callbacks=[kill], progress=False)
    assert "\n    computing Faulty" in str(caught.value)
    with pytest.raises(StepError, match="worker 1"):
        sgd.step()
    with pytest.raises(PeerLostError, match="worker 1"):
        sgd.evaluate(samples(4))
    at = sgd.stats().step
    assert at >= kill.last >= 5
    again = InProcessCluster(creator(), num_workers=2, strategy=as_strategy(strategy))
    again.step(at)
    assert same_bits(again.weights(), sgd.weights())  # of the last commit
    sgd.shutdown()
    with pytest.raises(ShutdownError):
        sgd.weights()


@pytest.mark.parametrize(
    ("strategy", "workers", "victim"),
    [(PS, 1, Peer("worker", 0)), (PS, 2, Peer("server", 1)), (ALLREDUCE, 2, Peer("worker", 1))],
    ids=["worker 0", "server 1", "member 1"],
)
def test_a_process_with_a_server_that_is_killed(
    strategy: Strategy, workers: int, victim: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single worker hosts the servers itself, the members of an allreduce one each."""
    run_config = RunConfig(failure=FailureConfig(snapshot_every=0))
    with DistributedSGD(
        creator(), num_workers=workers, strategy=strategy, run_config=run_config
    ) as sgd:
        sgd.step()
        pid = places_of(sgd)[victim].pid
        kill = At(5, lambda: os.kill(pid, signal.SIGKILL))
        with pytest.raises(PeerLostError, match=rf"{victim} on .*pid {pid}\) died"):
            sgd.fit(steps=1_000_000, callbacks=[kill], progress=False)
        for attempt in (sgd.weights, sgd.step, sgd.stats):
            with pytest.raises(PeerLostError, match=rf"{victim} on .*pid {pid}\) died"):
                attempt()
        monkeypatch.setattr(
            sgd._live().deaths, "raise_if_dead", lambda *_: None
        )  # as long as Ray has not noticed
        with pytest.raises(
            PeerLostError, match=rf"^{victim} on .*pid {pid}\) died: its process has ended without"
        ):
            sgd.weights()
        monkeypatch.undo()
        try:
            said = f"{sgd.evaluate(samples(4)).samples} samples"
        except PeerLostError as error:
            said = str(error)
        alive = (
            victim.role == "server"
        )  # workers that hold all of the last commit can still evaluate it
        assert re.match(rf"{victim} on |4 samples" if alive else rf"{victim} on ", said)


@pytest.mark.full
@pytest.mark.long
def test_a_worker_that_hangs() -> None:
    with DistributedSGD(
        creator(), num_workers=2, run_config=RunConfig(deadlines=DeadlineConfig(step=2, call=2))
    ) as sgd:
        sgd.step()
        before = sgd.weights()
        set_fault(sgd, 1, "hang")
        with pytest.raises(
            DeadlineError, match=r"step 2 was not committed within 2 s: still waiting for worker 1;"
        ):
            sgd.step()
        assert same_bits(sgd.weights(), before)
        with pytest.raises(DeadlineError, match="worker 1"):
            sgd.foreach_worker(lambda view: view.pid)
        with pytest.raises(DeadlineError, match="worker 1"):
            sgd.step()


def test_a_schedule_that_ends_too_early() -> None:
    rates = [0.1, 0.1]
    with DistributedSGD(linear_model_creator(learning_rate=lambda step: rates[step])) as sgd:
        with pytest.raises(
            ModelRaisedError, match=r"schedule raised in step 3: IndexError.*"
        ) as caught:
            sgd.fit(steps=5, progress=False)
        assert "rates[step]" in str(caught.value.__cause__)
        assert sgd.stats().step == 2
