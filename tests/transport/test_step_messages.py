"""What a step of a small model costs in messages: processes that compute pay for each that wakes another."""

from __future__ import annotations

from collections import Counter

import pytest

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.core.messages.message import Kind, Message
from steepest.testing import InProcessCluster
from steepest.testing.models import linear_model_creator

STEPS = 10
BEFORE = {Kind.ASK: 1}  # of a call of so many steps, not of each


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", ["ps", "allreduce"])
def test_a_step_has_two_messages_to_the_servers_and_one_back(name: str, workers: int) -> None:
    apart = name == "ps"  # here even one worker has no server inside
    strategy = ParameterServerStrategy(num_servers=1) if apart else AllreduceStrategy()
    cluster = InProcessCluster(linear_model_creator(), num_workers=workers, strategy=strategy)
    cluster.step(2)
    seen: Counter[Kind] = Counter()

    def see(message: Message) -> list[Message]:
        seen[message.kind] += 1
        return [message]

    cluster.network.filter = see
    cluster.step(STEPS)
    cluster.network.settle()
    apart = isinstance(
        strategy, ParameterServerStrategy
    )  # here even one worker has no server inside
    others = workers if apart else workers - 1
    each = {Kind.PUSH: others, Kind.REPORT: others, Kind.WEIGHTS: others, Kind.RESULT: 1}
    if not apart:
        each[Kind.COMMIT] = others
    expected = {kind: STEPS * count for kind, count in each.items() if count}
    assert seen == {**expected, **BEFORE, **({Kind.GRANT: others} if others else {})}


@pytest.mark.parametrize("chunk_bytes", [None, 16])
def test_the_last_chunk_leaves_with_the_report(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int | None
) -> None:
    strategy = ParameterServerStrategy(num_servers=1, chunk_bytes=chunk_bytes)
    cluster = InProcessCluster(linear_model_creator(), num_workers=1, strategy=strategy)
    chunks = len(cluster.job.description.layout.trainable_chunks)
    assert (chunks > 1) == (chunk_bytes is not None)
    happened: list[str] = []

    def sent(message: Message) -> list[Message]:
        if message.kind in (Kind.PUSH, Kind.REPORT):
            happened.append(message.kind.name)
        return [message]

    cluster.network.filter = sent
    transport = cluster.worker_routers[0].transport
    monkeypatch.setattr(transport, "pump", lambda: happened.append("pump"))
    cluster.step(1)
    one = ["PUSH", "pump"] * (chunks - 1) + ["PUSH", "REPORT", "pump"]
    assert happened[-len(one) :] == one
