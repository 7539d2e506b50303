"""Functions that use models with rows on servers between two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steepest.core.engine.replicas import Replicas
from steepest.core.messages.message import Message
from steepest.errors import ConfigurationError, PeerLostError
from steepest.tables.job.row_messages import RowKind
from steepest.testing import InProcessCluster
from tests.modes import MODES, make, trained
from tests.table_tasks import Clicks, clicks, mostly_long, rows_of, table_task, table_values, torchs

TASK = table_task()
DATA = clicks(9)


def evaluated(replicas: Replicas) -> float:
    return replicas.evaluate(DATA, 4, 0, 1).result.loss


def local_loss(cluster: InProcessCluster) -> float:
    """The loss of torch's model with the rows and weights of the servers."""
    module = torchs()
    module.load_state_dict({**table_values(TASK, rows_of(cluster)), **cluster.weights()})
    *inputs, target = DATA
    with torch.no_grad():
        return float(TASK.loss(module(*inputs), target))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", mostly_long(MODES, "sync", "allreduce", "async"))
def test_an_evaluation_between_steps_is_that_of_a_local_model(name: str) -> None:
    cluster = make(name, TASK, 2)
    for steps in (0, 3, 2):
        if steps:
            trained(cluster, steps)
        cluster.network.settle()
        expected = local_loss(cluster)
        for worker in cluster.workers:
            future = worker.at_version(0, cluster.coordinator.version, evaluated)
            assert cluster.wait(future, "an evaluation") == pytest.approx(expected, rel=1e-12)


def test_a_users_function_looks_rows_up_and_leaves_no_gradients() -> None:
    expected = make("sync", TASK, 2)
    trained(expected, 4)
    cluster = make("sync", TASK, 2)
    trained(cluster, 2)

    def use(replicas: Replicas) -> torch.Tensor:
        model: Any = replicas.models[0]
        module = model.module
        assert isinstance(module, Clicks)
        found = module.users(torch.arange(5))
        found.sum().backward()  # a gradient of nothing that is trained
        return found.detach()

    rows = table_values(TASK, rows_of(cluster))["users.weight"][:5]
    future = cluster.workers[0].at_version(0, 2, use)
    assert torch.equal(cluster.wait(future, "the rows"), rows)
    trained(cluster, 2)
    assert torch.equal(
        table_values(TASK, rows_of(cluster))["users.weight"],
        table_values(TASK, rows_of(expected))["users.weight"],
    )


def test_rows_are_not_looked_up_before_there_are_weights() -> None:
    cluster = make("sync", TASK, 2)
    future = cluster.workers[0].at_version(0, -1, evaluated)
    with pytest.raises(ConfigurationError, match="looked up outside of a job's steps"):
        cluster.wait(future, "an evaluation")
    trained(cluster, 2)


def test_what_is_asked_of_a_worker_that_waits_for_rows_is_done_afterwards() -> None:
    cluster = make("sync", TASK, 2)
    trained(cluster, 2)
    worker, asked = cluster.workers[0], []

    def ask(message: Message) -> list[Message]:
        if message.kind is RowKind.PULL_ROWS and not asked:
            asked.append(worker.at_version(0, -1, lambda replicas: replicas.worker))
            asked.append(worker.give_up())
        return [message]

    cluster.network.filter = ask
    future = worker.at_version(0, 2, evaluated)
    with pytest.raises(PeerLostError, match="rows of embedding tables were not sent"):
        cluster.wait(future, "an evaluation")
    assert cluster.wait(asked[0], "what was asked meanwhile") == 0
    cluster.wait(asked[1], "the end of the present step")
