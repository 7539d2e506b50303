"""Training with `transport="ray"`: the same bits as on the wire, and no socket."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from steepest import DistributedSGD, FailureConfig, ParameterServerStrategy, RunConfig
from steepest.errors import PeerLostError
from steepest.messages.message import worker_peer
from steepest.testing import InProcessCluster, linear_model_creator
from steepest.transport.sockets import WireTransport
from tests.reference import same_bits

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]


def sockets_of(pids: list[int]) -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if any(f"@steepest-{pid}-" in line for pid in pids)]


@pytest.mark.parametrize(("workers", "servers"), [(1, 2), (2, 2), (3, 1)])
def test_training_is_the_same_as_on_the_wire(
    workers: int, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(transport: str) -> dict[str, torch.Tensor]:
        strategy = ParameterServerStrategy(transport=transport, num_servers=servers, chunk_bytes=16)
        with DistributedSGD(linear_model_creator(), num_workers=workers, strategy=strategy) as sgd:
            sgd.fit(steps=5, progress=False)
            sgd.set_weights(sgd.weights())
            sgd.fit(steps=5, progress=False)
            cluster = sgd._cluster
            assert cluster is not None
            pids = [place.pid for place in cluster.places.values()]
            assert len(pids) == workers + (servers if workers > 1 else 0)
            assert [bool(sockets_of([pid])) for pid in pids] == [transport == "wire"] * len(pids)
            return sgd.weights()

    def refuse(*arguments: Any) -> None:
        raise AssertionError("no socket in the driver")

    in_process = InProcessCluster(linear_model_creator(), num_workers=workers)
    in_process.step(10)
    if workers == 2:  # for others in tests/test_sgd.py
        assert same_bits(train("wire"), in_process.weights())
    monkeypatch.setattr(WireTransport, "__init__", refuse)
    assert same_bits(train("ray"), in_process.weights())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("steepest")]


def test_a_dead_worker_is_named() -> None:
    strategy = ParameterServerStrategy(transport="ray", num_servers=1)
    run_config = RunConfig(failure=FailureConfig(max_failures=0))
    with DistributedSGD(
        linear_model_creator(), num_workers=2, strategy=strategy, run_config=run_config
    ) as sgd:
        sgd.fit(steps=1, progress=False)
        assert sgd._cluster is not None
        ray.kill(sgd._cluster.actors[worker_peer(1)])
        with pytest.raises(PeerLostError, match=r"worker 1.* died"):
            sgd.fit(steps=100, progress=False)
        assert sgd.weights()
