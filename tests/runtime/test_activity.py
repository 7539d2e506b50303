"""What each process of a job is doing, in words: for whoever sends SIGUSR1, and where a deadline passes."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from torch import nn

from steepest import (
    Callback,
    DeadlineConfig,
    DistributedSGD,
    FailureConfig,
    ParameterServer,
    ParameterServerStrategy,
    TorchModel,
)
from steepest.core.engine.in_words import chunks_in_words
from steepest.core.engine.topology import HostMap
from steepest.core.strategies.strategy import Strategy
from steepest.core.transport.router import Router
from steepest.errors import DeadlineError
from steepest.runtime import signals
from steepest.runtime.activity import activity_of, report
from steepest.runtime.deaths import persistently
from steepest.runtime.places import Place
from steepest.testing import InProcessCluster, linear_model_creator
from tests.modes import MODES, make
from tests.reference import samples, sgd
from tests.simulation.run import Simulation, pause, run_config

X, Y = samples(64)


def creator(worker_index: int, device_index: int) -> TorchModel:
    return TorchModel(
        nn.Linear(3, 2).double(),
        loss=nn.functional.mse_loss,
        data=(X, Y),
        batch_size=4,
        optimizer=sgd(),
    )


def wait_for_the_disk(*_: Any) -> None:
    pause(1e6)


def words(cluster: InProcessCluster) -> dict[str, str]:
    """By role, what it does, without seconds."""
    routers = {*cluster.server_routers, *cluster.worker_routers, cluster.client_router}
    return {
        str(peer): re.sub(r",? for [\d.e+-]+ s", "", str(status))
        for router in routers
        for peer, status in router.doing()
    }


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulation = Simulation(1)
    with simulation.running():
        yield simulation


# -- roles ---------------------------------------------------------------------------------------


def held_up(strategy: Strategy, hosts: HostMap | None = None) -> dict[str, str]:
    """By role, what it does when worker 1 hangs in the third step and all others have done theirs."""
    workers = 2 if hosts is None else len(hosts.workers)
    cluster = InProcessCluster(
        linear_model_creator(), num_workers=workers, strategy=strategy, hosts=hosts
    )
    cluster.step(2)
    cluster.hang(1)
    cluster.client.ask(1, True)
    cluster.network.run_until(
        lambda: words(cluster)["coordinator"].startswith("waits for worker 1 to"), "the others"
    )
    return words(cluster)


def test_roles_of_a_step_that_waits_for_a_worker_name_it() -> None:
    assert held_up(ParameterServerStrategy(num_servers=2)) == {
        "client 0": "knows of version 2; no step has ended",
        "coordinator": "waits for worker 1 to make version 3",
        "server 0": "waits for pushes of version 3 of worker 1 (chunk 0)",
        "server 1": "holds no chunk that is trained",
        "worker 0": "waits for the weights of version 3 (still to come: chunk 0 of server 0)",
        "worker 1": "has version 2, and waits to be granted a step",
    }


def test_an_aggregator_names_the_workers_whose_pushes_it_lacks() -> None:
    found = held_up(ParameterServerStrategy(num_servers=2), HostMap((1, 1, 0), (0, 1), True))
    assert found["aggregator 1"] == "waits for pushes from version 2 of worker 1 (chunk 0)"
    wanted = "waits for the weights of version 3 (still to come: chunk 0 of aggregator 1)"
    assert found["worker 0"] == wanted
    assert found["server 0"] == (
        "waits for pushes of version 3 of worker 0 (chunk 0), worker 1 (chunk 0)"
    )


def test_roles_of_asynchronous_training_name_the_worker_that_has_a_share() -> None:
    found = held_up(ParameterServerStrategy(mode="async", num_servers=1))
    assert re.fullmatch(r"waits for worker 1 to make version \d", found["coordinator"])
    assert found["server 0"].endswith(": none has come in part")


@pytest.mark.parametrize("name", MODES)
def test_roles_of_all_modes_can_be_asked_at_any_moment(name: str) -> None:
    cluster, seen = make(name), set[str]()

    def ended() -> bool:
        seen.update(words(cluster).values())
        return cluster.client.outcomes.qsize() == 3

    cluster.client.ask(3, True)
    cluster.network.run_until(ended, "three steps")
    assert not [text for text in seen if "cannot be asked" in text]
    assert any(text.startswith("waits for the weights of version ") for text in seen)
    assert any(re.search(r"waits for .*pushes .*version \d", text) for text in seen)


def test_a_call_that_does_not_return_is_shown_where_it_is() -> None:
    begun, going_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        going_on.wait()

    thread = threading.Thread(target=persistently, args=(wait, 0))
    thread.start()
    try:
        begun.wait()
        found = activity_of("a worker", Place("node", "host", 1, ()), Router(), None)
    finally:
        going_on.set()
        thread.join()
    # beside threads that are kept for later simulations
    assert len([stack for stack in found.calls if "in persistently" in stack]) == 1


def test_a_thread_in_other_code_is_shown_by_where_it_is() -> None:
    begun = threading.Event()
    other = types.ModuleType("loads_of_others")
    exec("def loads(begun, going_on): begun.set(); going_on.acquire()", vars(other))
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=other.loads, args=(begun, lock))
    thread.start()
    try:
        begun.wait()
        found = activity_of("a worker", Place("node", "host", 1, ()), Router(), None)
    finally:
        lock.release()
        thread.join()
    assert "loads of loads_of_others" in found.others


def test_chunks_in_words() -> None:
    assert chunks_in_words([3]) == "chunk 3"
    assert chunks_in_words([7, 0, 2, 1]) == "chunks 0-2, 7"
    assert chunks_in_words(range(0, 20, 2)) == "chunks 0, 2, 4, 6, 8, 10, 4 more"


# -- where a deadline passes ---------------------------------------------------------------------


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "steepest.deadlines"]


def test_a_call_that_hangs_in_a_worker_is_shown_with_its_stack(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    def call(view: Any) -> None:
        if view.index == 1:
            wait_for_the_disk()

    config = run_config(deadlines=DeadlineConfig(call=5.0))
    with DistributedSGD(creator, 2, run_config=config) as trainer:
        trainer.step()
        with pytest.raises(DeadlineError, match="worker 1 did not answer within 5 s"):
            trainer.foreach_worker(call)
    (found,) = reports(caplog)
    assert found.startswith("a deadline has passed: worker 1 asked to ")
    assert re.search(r"\n    worker 1 runs a function between two steps, for 5\.\d s\n", found)
    # the stack that only worker 1 has, before those of the others
    alone = found[found.index("steepest worker 1 on") : found.index("steepest worker 0 on")]
    assert alone.index("in call\n") < alone.index("in wait_for_the_disk")


def test_a_process_that_is_stopped_is_shown_as_mute(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(deadlines=DeadlineConfig(step=5.0), failure=FailureConfig(heartbeat=60.0))
    strategy = ParameterServerStrategy(num_servers=2)
    with DistributedSGD(creator, 2, strategy=strategy, run_config=config) as trainer:
        trainer.step()
        servers = [each for each in simulation.living() if "server 1" in each.name]
        simulation.world.stop(servers[0])
        with pytest.raises(DeadlineError, match="waited 5 s in vain for"):
            trainer.weights()
        simulation.world.resume(servers[0])
    (found,) = reports(caplog)
    mute = found.splitlines()[1]
    assert mute.startswith("server 1 on ")
    assert re.search(r"its last sign of life came \d+\.\d s ago; it is stopped by a signal", mute)
    assert "waits for the state that is read of server 1" in found
    assert "in weights" in found, "the driver's own stack"


# -- SIGUSR1 -------------------------------------------------------------------------------------


@pytest.fixture
def handler() -> Iterator[None]:
    """Puts the handler back."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


class Nothing:
    """A job of which nothing can be asked."""


def test_a_users_handler_stays(handler: None) -> None:
    def own(number: int, frame: object) -> None:
        """A user's."""

    signal.signal(signal.SIGUSR1, own)
    signals.report_on_sigusr1(Nothing())
    assert signal.getsignal(signal.SIGUSR1) is own
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1)
    try:
        signals.report_on_sigusr1(Nothing())
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        faulthandler.unregister(signal.SIGUSR1)


class Printed:
    """Stands for stderr."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = threading.Event()

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        self.ended.set()


def test_a_signal_prints_also_what_cannot_be_asked_and_changes_nothing(
    handler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Nothing()
    signals.report_on_sigusr1(job)
    monkeypatch.setattr(sys, "stderr", printed := Printed())
    signal.raise_signal(signal.SIGUSR1)
    assert printed.ended.wait(60)
    assert "steepest cannot say what its processes are doing: AttributeError" in printed.text


class Signal(Callback):
    """Sends this process SIGUSR1 in the middle of `fit`, and waits for what is printed."""

    def __init__(self, printed: Printed) -> None:
        self.printed = printed

    def on_step(self, sgd: Any, result: Any) -> None:
        if result.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert self.printed.ended.wait(60)


@pytest.mark.ray
@pytest.mark.long
def test_sigusr1_to_a_driver_prints_what_each_process_does_and_training_goes_on(
    ray_cluster: None, handler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", printed := Printed())
    strategy = ParameterServerStrategy(num_servers=2)
    with DistributedSGD(creator, 2, strategy=strategy) as trainer:
        ended = trainer.fit(steps=4, callbacks=[Signal(printed)], progress=False)
        after = report(trainer._cluster)
    assert ended.step == 4
    for text in (printed.text, after):
        for role in ("worker 0", "worker 1", "server 0", "server 1"):
            assert re.search(rf"(?m)^steepest {role} on [\d.]+ \(pid \d+\)", text), text
            assert re.search(rf"(?m)^    {role} (has|waits|computes|holds)", text), text
        assert re.search(r"in _select\n", text), "a process that waits for messages"
        assert "does not answer" not in text
    assert re.search(r"thread MainThread:\n(.*\n)* +File .*, in on_step\n", printed.text)


@pytest.mark.ray
@pytest.mark.long
def test_a_server_of_arrays_that_is_stopped_is_shown_as_mute(
    ray_cluster: None, handler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with ParameterServer(np.zeros(4), num_servers=2, timeout=3.0) as server:
        server.push(np.ones(4))
        places = ray.get([each.place.remote() for each in server._access.servers.handles])
        os.kill(places[1].pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError):
                server.pull()
        finally:
            os.kill(places[1].pid, signal.SIGCONT)
        assert signal.getsignal(signal.SIGUSR1) is signals._begin_report
    (found,) = reports(caplog)
    assert found.splitlines()[1].startswith("server 1 does not answer within 2 s; ")
    assert re.search(
        r"(?m)^steepest server 0 on [\d.]+ \(pid \d+\), which began [\d.]+ s ago:$", found
    )
    assert re.search(r"waits for server 1 to answer pull \d+\n", found)
