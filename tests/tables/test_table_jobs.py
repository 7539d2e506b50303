"""Jobs whose rows lie on servers, against one process with torch's sparse embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from steepest.core.engine.topology import HostMap
from steepest.core.messages.message import Kind, server_peer
from tests.modes import PUSHED_TOGETHER, TOGETHER, check_counts, make, trained
from tests.reference import difference, same_bits
from tests.table_tasks import (
    OPTIMIZERS,
    PACKED,
    TASK,
    all_weights,
    clicks,
    in_one_process,
    mostly_long,
    rows_of,
    same_rows,
    table_task,
)

STEPS = 6
HOSTS = HostMap((0, 0, 1), (0, 1), gathers=True)
#: mode, optimizer of rows, workers, devices, servers, and what else is not as usual
JOBS: list[tuple[str, str, int, int, int, dict[str, Any]]] = [
    ("sync", "SGD", 1, 1, 1, {}),
    ("sync", "Adagrad", 1, 2, 2, {"accumulate": 2}),
    ("sync", "Adam", 2, 2, 3, {}),
    ("sync", "Adagrad", 3, 1, 1, {"accumulate": 2}),
    ("sync", "momentum", 2, 1, 2, {}),
    ("sync", "SGD", 3, 1, 2, {"hosts": HOSTS}),
    ("sync", "Adam", 3, 2, 2, {"hosts": HOSTS, "accumulate": 2}),
    ("copies", "Adam", 2, 1, 3, {"global_batch_size": 5}),
    ("copies", "SGD", 3, 2, 2, {}),
    ("allreduce", "Adagrad", 2, 1, 2, {"global_batch_size": 7}),
    ("allreduce", "Adam", 3, 2, 3, {}),
    ("allreduce", "SGD", 1, 2, 1, {}),
    ("replicated", "Adagrad", 3, 1, 3, {"accumulate": 2}),
    ("replicated", "momentum", 2, 2, 2, {}),
    ("groups", "Adam", 3, 1, 3, {"accumulate": 2}),
    ("groups", "Adagrad", 2, 2, 2, {"global_batch_size": 7}),
    ("sharded-groups", "SGD", 2, 1, 2, {}),
    ("sharded-groups", "Adam", 3, 2, 3, {}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("job", mostly_long(JOBS, *JOBS[1::3]), ids=str)
def test_a_job_trains_as_torch_does_in_one_process(job: tuple[Any, ...]) -> None:
    mode, optimizer, workers, devices, servers, others = job
    # torch's momentum moves rows that are not in a batch, too: there is but one
    data = clicks(rows=1) if optimizer == "momentum" else clicks()
    task = table_task(optimizer=None, data=data, row_optimizer=OPTIMIZERS[optimizer].ours)
    cluster = make(mode, task, workers, devices, servers, **others)
    trained(cluster, STEPS)
    size = others.get("global_batch_size", 2 * workers * devices * others.get("accumulate", 1))
    expected = in_one_process(task, OPTIMIZERS[optimizer], [(size, STEPS)])
    assert difference(all_weights(cluster, task), expected) < 1e-12
    untrained = in_one_process(task, OPTIMIZERS[optimizer], [])
    assert difference(expected, untrained) > 0.05


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", mostly_long([*PUSHED_TOGETHER, *PACKED], "sync", "bfloat16"))
def test_rows_are_the_same_bits_at_any_number_of_servers(mode: str) -> None:
    task, mode = (PACKED[mode], "sync") if mode in PACKED else (TASK, mode)
    expected = make("sync", task, 3, servers=1)
    trained(expected, STEPS)
    for servers in (2, 3) if mode == "sync" else (2,):
        cluster = make(mode, task, 3, servers=servers, shuffle=servers)
        trained(cluster, STEPS)
        assert same_bits(cluster.weights(), expected.weights())
        assert same_rows(rows_of(cluster), rows_of(expected))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mode", mostly_long([*TOGETHER, "async", "ssp-0"], "sync", "async", "groups")
)
def test_a_server_of_rows_alone_may_hear_of_commits_late(mode: str) -> None:
    """Workers have all weights of a version before that server has made it, and push again."""
    task = table_task()
    expected = make(mode, task, 2, servers=1)
    trained(expected, STEPS)
    settings = {"chunk_bytes": 4096}  # one chunk of dense weights
    cluster = make(mode, task, 2, servers=3, settings=settings)
    alone = {server_peer(index) for index in (1, 2)}
    late = (Kind.COMMIT, Kind.MEMBERS, Kind.WORKER_JOINED)
    cluster.network.latency = lambda message: (
        30 if message.kind in late and message.target in alone else 0
    )
    trained(cluster, STEPS)
    if mode in TOGETHER:
        assert difference(all_weights(cluster, task), all_weights(expected, task)) < 1e-12
    else:
        check_counts(cluster, cluster.log())


def test_a_server_of_rows_alone_may_hear_late_of_who_has_joined() -> None:
    """A successor that was missing when a generation began has all weights, and pushes, before that server knows it."""
    task = table_task(data=clicks(23))
    cluster = make("async", task, 2, servers=3, settings={"chunk_bytes": 4096}, replaces=True)
    cluster.on_left = lambda worker: None
    trained(cluster, 2)
    cluster.kill(1)
    cluster.network.settle()
    cluster.wait(cluster.client.revoke(), "a generation without the dead worker")
    cluster.network.latency = lambda message: 200 * (message.kind is Kind.WORKER_JOINED)
    cluster.replace(1)
    trained(cluster, STEPS)
    log = cluster.log()
    check_counts(cluster, log)
    assert any(
        push.worker == 1 and push.incarnation for commit in log.commits for push in commit.pushes
    )
