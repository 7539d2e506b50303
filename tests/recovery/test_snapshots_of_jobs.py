"""Copies of a job that is at work: all of one version, and a job that continues from one gives the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.engine.replicas import Replicas
from steepest.core.messages.message import Kind, Message, Peer
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import PeerLostError
from steepest.runtime import remote_functions
from steepest.runtime.state.job_state import JobState
from steepest.runtime.worker_state import WorkerState, worker_state
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster
from tests.modes import trained
from tests.random_examples import SEEDS, runs
from tests.recovery.snapshot_kinds import BUFFERS, KINDS, WIDE
from tests.reference import Task, Weights, same_bits

WORKERS, STEPS = 3, 12
LONG = 10_000


def make(kind: str, shuffle: int | None = None, devices: int = 1) -> InProcessCluster:
    task, strategy = KINDS[kind]
    return InProcessCluster(
        task.creator(),
        num_workers=WORKERS,
        devices_per_worker=devices,
        strategy=strategy,
        shuffle=shuffle,
        keep_log=True,
    )


def own_states(cluster: InProcessCluster) -> list[WorkerState]:
    """What each worker has between two steps."""
    at, step = cluster.client.position, cluster.coordinator.version
    return [
        cluster.wait(
            worker.at_version(at.generation, at.version, partial(worker_state, step=step)), "it"
        )
        for worker in cluster.workers
    ]


def bits_of(layout: ParameterLayout, found: Any, workers: Sequence[WorkerState]) -> Weights:
    """Everything that the processes of a job hold, by name."""
    bits = layout.named(found.weights)
    bits |= {
        f"server/{chunk}/{about['name']}/{about['key']}/{about['start']}": value
        for chunk, about, value in found.records
    }
    for index, own in enumerate(workers):
        for replica, state in enumerate(own.buffers):
            bits |= {f"{index}/{replica}/{name}": value for name, value in state.items()}
        bits |= {
            f"{index}/{name}": value
            for state in own.exchanged.values()
            for name, value in state.items()
        }
        if own.inner is not None:
            bits |= {f"{index}/inner/{name}": value for name, value in own.inner[0].items()}
    return bits


def all_bits(cluster: InProcessCluster) -> Weights:
    """The same of a job between two steps."""
    found = cluster.snapshot("state")
    return bits_of(cluster.job.description.layout, found, own_states(cluster))


def ask(cluster: InProcessCluster, version: int) -> Callable[[], JobState | None]:
    """Asks for a copy of a version; what is returned gives it, or None where a worker was past it."""
    job = cluster.job
    take = partial(worker_state, step=job.step_of(version))
    parts = [worker.exactly_at(0, version, take) for worker in cluster.workers]
    read = cluster.client.read("state", version)

    def copy() -> JobState | None:
        found = cluster.wait(read, "the servers' part")
        workers = [cluster.wait(part, "a worker's part") for part in parts]
        own = [each for each in workers if each is not None]
        if len(own) < len(workers) or found.version != version:
            return None
        return JobState(job, job.plan(), job.seed, found, cluster.log(), own)

    return copy


def go_back(cluster: InProcessCluster, copy: JobState) -> None:
    """Continues from a copy, as the driver has processes do after a death."""
    job, stock = cluster.job, copy.renumbered({})  # the dead are among those that it has

    def call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        run = lambda replicas: function(replicas, *arguments)  # noqa: E731
        at = cluster.client.position
        futures = [w.at_version(at.generation, at.version, run) for w in cluster.workers]
        return [cluster.wait(future, "a call") for future in futures]

    stock.optimizer.place(SimpleNamespace(job=job, workers=SimpleNamespace(call=call)), same=True)  # type: ignore[arg-type]
    found = stock.shared
    cluster.wait(
        cluster.client.install(found.version, found.weights, found.records, found.state), "it"
    )
    buffers = stock.buffers
    if buffers is None:
        call(Replicas.use_plan, copy.plan, copy.seed)
    else:
        call(remote_functions.continue_from, copy.plan, copy.seed, *buffers, job.replicas)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@runs(4)
@given(shuffle=SEEDS, ahead=st.integers(2, 5), devices=st.integers(1, 2))
def test_a_job_set_back_to_a_copy_gives_the_bits_of_an_undisturbed_one(
    kind: str, shuffle: int, ahead: int, devices: int
) -> None:
    undisturbed = make(kind, devices=devices)
    trained(undisturbed, STEPS)
    cluster = make(kind, shuffle, devices)
    trained(cluster, 3)
    copy = ask(cluster, 3 + ahead)
    trained(cluster, STEPS - 3)
    found = copy()
    assert found is not None, "no worker was there yet when it was asked for"
    assert found.shared.version == 3 + ahead
    survivors = all_bits(cluster)
    assert same_bits(survivors, all_bits(undisturbed))
    trained(cluster, 2)  # which are lost
    assert not same_bits(all_bits(cluster), survivors)
    go_back(cluster, found)
    trained(cluster, STEPS - 3 - ahead)
    assert same_bits(all_bits(cluster), survivors)
    other = make(kind, shuffle + 1, devices)  # all of its processes are other ones
    trained(other, 1)
    go_back(other, found)
    trained(other, STEPS - 3 - ahead)
    assert same_bits(all_bits(other), survivors)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["buffers", "topk", "local"])
@runs(20)
@given(shuffle=SEEDS, rounds=st.integers(0, 60), ahead=st.integers(0, 3))
def test_a_copy_asked_for_while_workers_train_is_of_its_version_or_there_is_none(
    kind: str, shuffle: int, rounds: int, ahead: int
) -> None:
    cluster = make(kind, shuffle)
    cluster.client.ask(LONG, False)
    begun = cluster.network.rounds
    cluster.network.run_until(lambda: cluster.network.rounds > begun + rounds, "some rounds")
    version = cluster.coordinator.version + ahead
    copy = ask(cluster, version)
    cluster.network.run_until(lambda: cluster.coordinator.version > version + 3, "it")
    found = copy()
    assert found is not None or ahead < 2, "nobody is two updates ahead of the coordinator"
    if found is None:
        return
    straight = make(kind)
    trained(straight, version)
    assert same_bits(
        bits_of(found.job.description.layout, found.shared, found.workers), all_bits(straight)
    )


def messages_of(cluster: InProcessCluster, work: Callable[[], Any]) -> Counter[Kind]:
    """How many messages of each kind are sent during some work."""
    seen: Counter[Kind] = Counter()

    def see(message: Message) -> list[Message]:
        seen[message.kind] += 1
        return [message]

    cluster.network.filter = see
    work()
    cluster.network.settle()
    cluster.network.filter = lambda message: [message]
    return seen


def test_a_copy_of_a_later_version_takes_the_messages_of_one_of_the_present_version() -> None:
    cluster = make("buffers")

    def step(*reads: int) -> Counter[Kind]:
        def work() -> None:
            for at in reads:
                cluster.client.read("state", at)
            trained(cluster, 2)

        return messages_of(cluster, work)

    step()
    alone, now = step(), step(0)
    later = step(cluster.coordinator.version + 1)
    assert later == now
    assert later - alone == Counter(
        {
            Kind.READ: 1,
            Kind.SNAPSHOT: 1,  # to server 1: server 0 lives with the coordinator
            Kind.SNAPSHOT_END: 2,
            Kind.WEIGHTS: len(cluster.job.description.layout.chunks),
            Kind.STATE: later[Kind.STATE],
        }
    )


def test_a_version_that_is_past_is_not_waited_for() -> None:
    cluster = make("buffers")
    trained(cluster, 3)
    assert ask(cluster, 2)() is None
    read = cluster.client.read("state", 2)
    assert cluster.wait(read, "the present version").version == 3
    copy = ask(cluster, 3)()  # at which workers stand still
    assert copy is not None
    assert copy.shared.version == 3


def test_of_two_copies_of_later_versions_the_second_takes_the_place_of_the_first() -> None:
    cluster = make("buffers")
    trained(cluster, 1)
    first = cluster.client.read("state", 4)
    earlier = [worker.exactly_at(0, 4, lambda replicas: 4) for worker in cluster.workers]
    second = ask(cluster, 3)
    assert first.cancelled()
    assert [future.result() for future in earlier] == [None] * WORKERS
    snapshots = messages_of(cluster, lambda: trained(cluster, 5))[Kind.SNAPSHOT]
    assert snapshots == 1, "server 1 is told once"
    found = second()
    assert found is not None
    assert found.shared.version == 3


def test_a_worker_that_gets_another_role_ends_the_calls_that_wait() -> None:
    cluster = make("buffers")
    trained(cluster, 1)
    worker = cluster.workers[0]
    waiting = [worker.exactly_at(0, 9, worker_state_of), worker.at_version(0, 9, worker_state_of)]
    worker.leave()
    for future in waiting:
        with pytest.raises(PeerLostError, match="another role"):
            future.result()


def worker_state_of(replicas: Replicas) -> WorkerState:
    return worker_state(replicas, 0)


def test_a_reader_that_leaves_is_waited_for_no_more() -> None:
    cluster = make("buffers")
    trained(cluster, 1)
    cluster.client.read("state", 3)
    cluster.network.settle()
    coordinator = cluster.coordinator
    coordinator.lost(Peer("client", 0), "it left")
    assert not coordinator._waiting


@pytest.mark.parametrize(
    ("task", "strategy", "has"),
    [
        (Task(), ParameterServerStrategy(), False),
        (Task(), AllreduceStrategy(), False),
        (BUFFERS, AllreduceStrategy(), True),
        (WIDE, AllreduceStrategy(compression="int8"), True),
        (Task(), LocalStrategy(), True),
    ],
)
def test_workers_are_asked_only_where_they_may_have_something_of_their_own(
    task: Task, strategy: Strategy, has: bool
) -> None:
    cluster = InProcessCluster(task.creator(), num_workers=2, strategy=strategy)
    assert cluster.job.workers_have_state == has


def test_other_workers_get_the_mean_of_a_copy() -> None:
    cluster = make("buffers")
    copy = ask(cluster, 3)
    trained(cluster, 4)
    found = copy()
    assert found is not None
    assert found.renumbered({0: 0, 2: 1}) is found, "it is of all workers that there were"
    own, mean = found.buffers or ({}, {})
    assert sorted(own) == [0, 1, 2]
    for name in ("1.running_mean", "1.running_var"):
        expected = sum(state[name] for state in own.values()) / 3
        assert torch.allclose(mean[name], expected, rtol=1e-14)
