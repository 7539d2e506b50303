"""Processes that live on although their own code has failed: killed, replaced once, and no more without progress."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from steepest import (
    AllreduceStrategy,
    DeadlineConfig,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
)
from steepest.core.messages.message import Kind, Message, Peer, server_peer, worker_peer
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ModelRaisedError, PeerLostError
from tests.living import places_of
from tests.reference import Task, difference, samples, sgd

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

TASK = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(64))


def spoil(view: Any) -> None:
    """From now on a router that cleans up after a step meets the end of its descriptors."""
    if view.index == 1:
        import steepest.core.engine.replicas

        def fail(memory: Any) -> int:
            raise OSError(24, "Too many open files")

        steepest.core.engine.replicas.forget_writes = fail


@pytest.mark.parametrize(
    "strategy",
    [ParameterServerStrategy(num_servers=1), AllreduceStrategy(sharded=False)],
    ids=lambda s: s.name,
)
def test_a_worker_whose_own_code_fails_is_killed_and_replaced(
    strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    run_config = RunConfig(failure=FailureConfig(spares=0), deadlines=DeadlineConfig(step=60))
    with DistributedSGD(
        TASK.creator(), num_workers=2, strategy=strategy, run_config=run_config
    ) as trainer:
        trainer.fit(steps=2, progress=False)
        before = trainer.foreach_worker(lambda view: view.pid)
        with pytest.raises(ModelRaisedError, match="Too many open files"):
            trainer.foreach_worker(spoil)  # which cleans up, too
        with caplog.at_level(logging.WARNING, "steepest"):
            trainer.fit(steps=8, progress=False)
        after = trainer.foreach_worker(lambda view: view.pid)
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]
        assert difference(trainer.weights(), TASK.train(2, 10)) < 1e-12
        assert trainer.stats().replaced == 1
    (line,) = [
        text for text in map(logging.LogRecord.getMessage, caplog.records) if "in fail" in text
    ]
    assert "worker 1 on " in line
    assert f"(pid {before[1]}): its router ended: OSError" in line


def failing(own: Peer, kind: Kind, at: int) -> Any:
    """A model creator of whose job one role fails whenever it is sent a message of a kind with a version."""

    def attend(router: Any, peer: Peer, role: Any) -> None:
        if peer != own:
            return
        handle = role.handle

        def fails(source: Peer, message: Message) -> None:
            body = message.body
            if message.kind is kind and getattr(body, "version", getattr(body, "limit", 0)) == at:
                raise MemoryError("no page is left")
            handle(source, message)

        role.handle = fails

    def create(worker: int, device: int) -> Any:
        model = TASK.creator()(worker, device)
        model.attend = attend  # type: ignore[attr-defined]
        return model

    return create


@pytest.mark.long
def test_a_server_whose_own_code_fails_is_killed_and_its_copy_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = ParameterServerStrategy(num_servers=2, replication=2, chunk_bytes=64)
    create = failing(server_peer(1), Kind.COMMIT, 5)
    with DistributedSGD(create, num_workers=2, strategy=strategy) as trainer:
        place = places_of(trainer)[server_peer(1)]
        with caplog.at_level(logging.WARNING, "steepest"):
            assert trainer.fit(steps=12, progress=False).step == 12
        assert places_of(trainer)[server_peer(1)].pid != place.pid
        assert difference(trainer.weights(), TASK.train(2, 12)) < 1e-12
    (line,) = [
        text for text in map(logging.LogRecord.getMessage, caplog.records) if "in fails" in text
    ]
    assert f"(pid {place.pid}): its router ended: MemoryError: no page is left" in line


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServerStrategy(num_servers=1),
        pytest.param(AllreduceStrategy(sharded=False), marks=pytest.mark.long),
    ],
    ids=lambda s: s.name,
)
def test_what_fails_again_without_progress_ends_the_job(
    strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    create = failing(worker_peer(1), Kind.GRANT, 3)
    with (
        DistributedSGD(create, num_workers=2, strategy=strategy) as trainer,
        caplog.at_level(logging.WARNING),
    ):
        with pytest.raises(
            PeerLostError, match=r"^worker 1 .*MemoryError: no page is left \(as the one before"
        ) as caught:
            trainer.fit(steps=3, progress=False)
        assert 'raise MemoryError("no page is left")' in str(caught.value.__cause__)
        told = [
            text for text in map(logging.LogRecord.getMessage, caplog.records) if "in fails" in text
        ]
        assert len(told) == 2  # of the first, and of its successor


def test_the_first_failure_that_nothing_cures_is_told_with_its_traceback() -> None:
    create = failing(worker_peer(0), Kind.GRANT, 3)
    with DistributedSGD(create, num_workers=1) as trainer:
        with pytest.raises(
            PeerLostError, match=r"^worker 0 .*its router ended: MemoryError"
        ) as caught:
            trainer.fit(steps=3, progress=False)
        assert 'raise MemoryError("no page is left")' in str(caught.value.__cause__)
