"""What goes wrong in one process of a job, and what the others make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steepest.core.engine.hosting import host_client
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import (
    COORDINATOR,
    Kind,
    Message,
    Peer,
    server_peer,
    worker_peer,
)
from steepest.core.models.torch import TorchModel
from steepest.errors import PeerLostError
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster, linear_model_creator
from tests.inside import buffers_of
from tests.random_examples import SEEDS, runs, seeds
from tests.reference import Task, Weights, same_bits, samples, sgd

Trouble = Callable[[torch.Tensor], torch.Tensor]
some = runs(15)


class Net(nn.Module):
    """Trouble comes in the middle of the backward pass, when the last layer's gradient is out already."""

    def __init__(self, trouble: dict[int, Trouble]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5).double()
        self.last = nn.Linear(5, 2).double()
        self.worker = -1
        self.trouble = trouble

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.worker in self.trouble:
            hidden.register_hook(self.trouble[self.worker])
        return self.last(hidden)


def make(trouble: dict[int, Trouble] | None = None, **options: Any) -> InProcessCluster:
    """Three workers and three servers; `trouble` says what befalls a worker's gradient."""
    task = Task(lambda: Net({} if trouble is None else trouble), sgd(momentum=0.9), samples(16))

    def create(worker_index: int, device_index: int) -> TorchModel:
        model = task.creator()(worker_index, device_index)
        model.module.worker = worker_index
        return model

    strategy = ParameterServerStrategy(num_servers=3, chunk_bytes=64)
    return InProcessCluster(create, num_workers=3, strategy=strategy, **options)


def known(steps: int) -> list[Weights]:
    """The weights of each version of a run without trouble."""
    cluster = make()
    found = [cluster.weights()]
    for _ in range(steps):
        cluster.step()
        found.append(cluster.weights())
    return found


KNOWN = known(8)


def failure(cluster: InProcessCluster, steps: int = 1) -> Failure:
    """The failure in which some steps end."""
    last = cluster.step(steps)[-1]
    assert isinstance(last, Failure)
    return last


def at(cluster: InProcessCluster, version: int) -> bool:
    """Whether the servers hold just what a run without trouble has at a version."""
    snapshot = cluster.snapshot()
    return snapshot.version == version and same_bits(cluster.weights(), KNOWN[version])


def place(record: Any) -> Any:
    """Where a record of optimizer state belongs."""
    return record[0], record[1]["name"], record[1]["start"]


def raising(gradient: torch.Tensor) -> torch.Tensor:
    raise ValueError("no luck today")


def once_at(
    cluster: InProcessCluster, version: int, do: Trouble, trouble: dict[int, Trouble], worker: int
) -> None:
    """Trouble for one worker in one step."""

    def wait(gradient: torch.Tensor) -> torch.Tensor:
        if cluster.coordinator.version != version:
            return gradient
        del trouble[worker]
        return do(gradient)

    trouble[worker] = wait


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_model_that_raises_fails_the_step_and_nothing_of_it_is_applied(worker: int) -> None:
    trouble: dict[int, Trouble] = {}
    cluster = make(trouble)
    once_at(cluster, 3, raising, trouble, worker)
    about = failure(cluster, 8)
    assert (about.reason, about.worker, about.step) == ("raised", worker, 3)
    assert about.error == "ValueError: no luck today"
    assert "in raising" in about.traceback
    assert at(cluster, 3)
    assert cluster.step(5)[-1].version == 8
    assert at(cluster, 8)


@some
@given(shuffle=SEEDS, worker=st.integers(0, 2), version=st.integers(0, 6))
def test_a_step_taken_again_is_the_same_step_in_any_order_of_messages(
    shuffle: int, worker: int, version: int
) -> None:
    trouble: dict[int, Trouble] = {}
    cluster = make(trouble, shuffle=shuffle)
    once_at(cluster, version, raising, trouble, worker)
    assert failure(cluster, 8).step == version
    assert cluster.step(8 - version)[-1].version == 8
    assert at(cluster, 8)


@pytest.mark.long
@some
@given(shuffle=SEEDS, events=st.integers(0, 400))
def test_steps_taken_back_at_any_moment_can_be_taken_again(shuffle: int, events: int) -> None:
    cluster = make(shuffle=shuffle)
    cluster.client.ask(8, True)
    network = cluster.network
    network.run_until(
        lambda: network.delivered >= events or cluster.coordinator.version == 8, "some messages"
    )
    position = cluster.wait(cluster.client.revoke(), "the coordinator")
    assert at(cluster, position.version)
    while not cluster.client.outcomes.empty():
        cluster.client.outcomes.get()
    if position.version < 8:
        assert cluster.step(8 - position.version)[-1].version == 8
    assert at(cluster, 8)


def test_who_has_stopped_workers_knows_the_generation_that_began() -> None:
    """What the driver has workers do next waits until they know it too."""
    cluster = make()
    before = cluster.coordinator.generation
    cluster.client.ask(8, True)
    cluster.wait(cluster.client.stop(), "the coordinator")
    assert cluster.client.position.generation == cluster.coordinator.generation > before


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_not_applied(factor: float) -> None:
    trouble: dict[int, Trouble] = {}
    cluster = make(trouble)
    cluster.step(3)
    before = cluster.snapshot("state").records
    once_at(cluster, 3, lambda gradient: gradient * factor, trouble, 1)
    about = failure(cluster)
    assert about.reason == "nonfinite"
    assert sorted(about.culprits) == [(1, "first.bias"), (1, "first.weight")]
    assert at(cluster, 3)
    after = cluster.snapshot("state").records
    assert len(before) > 4
    for (_, a, x), (_, b, y) in zip(
        sorted(before, key=place), sorted(after, key=place), strict=True
    ):
        assert (a["name"], a["key"]) == (b["name"], b["key"])
        assert torch.equal(x, y)
    cluster.step(5)
    assert at(cluster, 8)


@pytest.mark.long
@seeds(5, "shuffle")
def test_repeated_pushes_and_reports_count_once(shuffle: int) -> None:
    cluster = make(shuffle=shuffle)
    last: dict[Any, Message] = {}

    def repeat(message: Message) -> list[Message]:
        if message.kind not in (Kind.PUSH, Kind.REPORT, Kind.VERSION_STAGED):
            return [message]
        old = last.get(
            about := (
                message.source,
                message.target,
                message.kind,
                getattr(message.body, "chunk", 0),
            )
        )
        last[about] = replace(message)
        return [message, replace(message), *([replace(old)] if old else [])]

    cluster.network.filter = repeat
    cluster.step(8)
    assert at(cluster, 8)
    assert max(map(buffers_of, cluster.servers)) <= 4  # one for each worker, one for a repetition


@pytest.mark.parametrize("worker", [0, 2])
def test_a_lost_worker_is_named_and_the_last_commit_stands(worker: int) -> None:
    cluster = make()
    cluster.step(3)
    cluster.disconnect(worker_peer(worker))
    for _ in range(2):
        about = failure(cluster)
        assert (about.reason, about.peer, about.step) == ("lost", worker_peer(worker), 3)
        assert at(cluster, 3)
    assert cluster.client.outcomes.empty()


def test_who_gives_up_in_the_middle_of_a_step_says_so_whoever_is_lost_then() -> None:
    ended: list[Any] = []

    def lose(gradient: torch.Tensor) -> torch.Tensor:
        worker = cluster.workers[1]
        ended.append(worker.at_version(0, 3, lambda replicas: None))
        ended.append(worker.give_up())
        worker.lost(server_peer(1), "killed")
        assert ended[0].exception() is not None  # which waits for weights
        assert not ended[1].done()
        return gradient

    trouble: dict[int, Trouble] = {}
    cluster = make(trouble)
    cluster.step(2)
    trouble[1] = lose
    cluster.client.ask(1, True)
    cluster.network.run_until(lambda: bool(ended) and ended[1].done(), "the end of the step")
    ended[1].result()


def test_a_result_that_comes_after_the_word_of_a_loss_is_not_that_of_the_next_step() -> None:
    cluster = make()
    cluster.step(2)
    client = cluster.client
    client.lost(server_peer(0), "killed")
    assert isinstance(client.outcomes.get(), PeerLostError)  # what was asked for ends with it
    late = Result(client.position.generation, 3, 3, 6, bytes_pushed=0, bytes_pulled=0, staleness=())
    client.handle(COORDINATOR, late.pack())
    client.ask(1, True)
    assert isinstance(client.outcomes.get(), PeerLostError)
    assert client.outcomes.empty()


@pytest.mark.long
@some
@given(shuffle=SEEDS, pushes=st.integers(0, 3))
def test_a_worker_lost_amid_its_pushes_has_pushed_nothing(shuffle: int, pushes: int) -> None:
    cluster = make(shuffle=shuffle)
    cluster.step(3)
    pushed = []

    def cut(message: Message) -> list[Message]:
        if message.kind is Kind.PUSH and message.source == worker_peer(1):
            pushed.append(message)
            if len(pushed) > pushes:
                cluster.disconnect(worker_peer(1))
                return []
        return [message]

    cluster.network.filter = cut
    assert failure(cluster).peer == worker_peer(1)
    assert at(cluster, 3)


@pytest.mark.parametrize("server", [1, 2])
def test_a_lost_server_is_named_and_nothing_waits_for_it(server: int) -> None:
    cluster = make()
    cluster.step(3)
    pending = cluster.client.read("weights")
    cluster.network.filter = lambda message: (
        [] if message.source == server_peer(server) else [message]
    )
    cluster.disconnect(server_peer(server))
    with pytest.raises(PeerLostError, match=f"server {server} is gone"):
        cluster.wait(pending, "a snapshot")
    with pytest.raises(PeerLostError, match=f"server {server} is gone"):
        cluster.step()
    for ask in (cluster.snapshot, lambda: cluster.wait(cluster.client.revoke(), "nothing")):
        with pytest.raises(PeerLostError, match=f"server {server} is gone"):
            ask()
    cluster.network.run_until(
        lambda: cluster.coordinator.losses.keys() == {server_peer(server)},
        "the coordinator to see it",
    )
    assert cluster.coordinator.version == 3


def test_the_loss_of_a_worker_is_no_loss_for_the_client() -> None:
    cluster = make()
    pending = cluster.client.read("weights")
    cluster.client.lost(worker_peer(1), "closed")  # where the driver is the server, both see it
    assert cluster.wait(pending, "a snapshot").version == 0
    assert cluster.client.outcomes.empty()


@pytest.mark.parametrize("kind", [Kind.REPORT, Kind.PUSH])
def test_a_silent_worker_ends_in_a_deadline_that_names_it(kind: Kind) -> None:
    cluster = make(step_timeout=100.0)
    cluster.step(3)
    cluster.network.filter = lambda m: [] if m.kind is kind and m.source == worker_peer(1) else [m]
    about = failure(cluster)
    assert (about.reason, about.step, about.seconds) == ("deadline", 3, 100.0)
    if kind is Kind.REPORT:
        assert about.awaited == ["worker 1"]
    assert at(cluster, 3)
    cluster.network.filter = lambda m: [m]
    assert cluster.step(5)[-1].version == 8
    assert at(cluster, 8)


@some
@given(shuffle=SEEDS, pauses=st.lists(st.integers(1, 120), min_size=1, max_size=6))
def test_a_snapshot_shows_one_version_over_all_servers(shuffle: int, pauses: list[int]) -> None:
    cluster = make(shuffle=shuffle)
    cluster.client.ask(8, True)
    reads = []
    network = cluster.network
    for pause in pauses:
        until = network.delivered + pause
        network.run_until(
            lambda until=until: network.delivered >= until or cluster.coordinator.version == 8, "it"
        )
        reads.append(cluster.client.read("weights"))
    layout = cluster.job.description.layout
    versions = []
    for read in reads:
        snapshot = cluster.wait(read, "a snapshot")
        named = {
            e.name: layout.entry_view(snapshot.weights, i) for i, e in enumerate(layout.entries)
        }
        assert same_bits(named, KNOWN[snapshot.version])
        versions.append(snapshot.version)
    assert versions == sorted(versions)


@pytest.mark.long
@seeds(5, "shuffle")
def test_weights_and_optimizer_put_back_continue_as_if_nothing_had_happened(shuffle: int) -> None:
    cluster = make(shuffle=shuffle)
    cluster.step(3)
    saved = cluster.snapshot("state")
    copies = [record[2].clone() for record in saved.records]
    cluster.step(2)
    for again in (cluster, make(shuffle=shuffle + 1)):
        position = again.wait(
            again.client.install(3, saved.weights, saved.records), "the installation"
        )
        assert position.version == 3
        assert at(again, 3)
        assert again.step(5)[-1].version == 8
        assert at(again, 8)
    assert all(
        torch.equal(record[2], copy) for record, copy in zip(saved.records, copies, strict=True)
    )


def test_weights_alone_may_be_put_and_the_optimizer_goes_on() -> None:
    cluster = make()
    cluster.step(3)
    snapshot = cluster.snapshot("state")
    cluster.wait(
        cluster.client.install(3, torch.zeros_like(snapshot.weights), None), "the installation"
    )
    assert all(not value.any() for value in cluster.weights().values())
    after = cluster.snapshot("state").records
    for (*_, x), (*_, y) in zip(
        sorted(snapshot.records, key=place), sorted(after, key=place), strict=True
    ):
        assert torch.equal(x, y)
    cluster.wait(cluster.client.install(3, snapshot.weights, []), "the installation")
    assert not cluster.snapshot("state").records
    assert at(cluster, 3)


def test_what_is_put_shares_no_memory_with_what_was_given() -> None:
    cluster = make()
    cluster.step(1)
    saved = cluster.snapshot("state")
    sent: list[Message] = []
    router = cluster.network.router()
    router.sender = lambda source: lambda target, message: sent.append(message)  # type: ignore[method-assign]
    host_client(router, cluster.job, 1).install(1, saved.weights, saved.records)
    given = {
        saved.weights.untyped_storage().data_ptr(),
        *(r[2].untyped_storage().data_ptr() for r in saved.records),
    }
    assert not given & {
        m.payload.untyped_storage().data_ptr() for m in sent if m.payload is not None
    }


def test_a_client_that_leaves_is_no_loss_for_the_job() -> None:
    cluster = make()
    cluster.disconnect(Peer("client", 0))
    cluster.network.settle()
    assert not cluster.coordinator.losses


def test_an_install_without_all_members_is_refused_at_once() -> None:
    cluster = InProcessCluster(linear_model_creator(), num_workers=2)
    cluster.step(2)
    before = cluster.snapshot()
    cluster.disconnect(worker_peer(1))
    with pytest.raises(PeerLostError, match="nothing was installed: worker 1 is gone"):
        cluster.wait(
            cluster.client.install(1, torch.zeros_like(before.weights), None), "an install"
        )
    assert torch.equal(cluster.snapshot().weights, before.weights)
