"""What workers report of a step: what is left out is not counted, and ends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from steepest.core.messages.message import Kind, Message, worker_peer
from tests.modes import make, trained
from tests.reference import Task, same_bits, sgd
from tests.said import with_fields


@pytest.mark.parametrize(
    "left_out", [("metrics",), ("timings",), ("loss",), ("metrics", "timings", "loss")]
)
@pytest.mark.parametrize("name", ["sync", "replicated", "backup"])
def test_a_report_that_says_less_is_a_report(name: str, left_out: Sequence[str]) -> None:
    task = Task(optimizer=sgd())
    cluster, undisturbed = make(name, task), make(name, task)

    def leave_out(message: Message) -> list[Message]:
        if message.kind is Kind.REPORT and message.source == worker_peer(1):
            usual = {"metrics": {}, "timings": {}, "loss": None}
            return [with_fields(message, **{field: usual[field] for field in left_out})]
        return [message]

    cluster.network.filter = leave_out
    trained(cluster, 3)
    trained(undisturbed, 3)
    assert same_bits(cluster.weights(), undisturbed.weights())
