"""Ten thousand unauthenticated connections to every port of a job on Ray, at a limit of 1,024 descriptors."""

from __future__ import annotations

import resource
import threading
from typing import Any

import pytest

from steepest import AllreduceStrategy, DistributedSGD, ParameterServerStrategy
from steepest.core.transport.strangers import MOST_OPENINGS
from steepest.testing import linear_model_creator
from tests.pairs import diagonal
from tests.transport.unauthenticated_connections import UnauthenticatedConnections

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]
STRATEGIES = {"ps": ParameterServerStrategy(num_servers=1), "allreduce": AllreduceStrategy()}


@pytest.mark.few(1)
@diagonal(strategy=STRATEGIES, family=["tcp", "unix"])
def test_training_goes_on_beside_unauthenticated_connections(strategy: str, family: str) -> None:
    with DistributedSGD(
        linear_model_creator(), num_workers=2, strategy=STRATEGIES[strategy]
    ) as sgd:
        sgd.fit(steps=20, progress=False)
        cluster: Any = sgd._live()
        for place in cluster.places.values():
            _, hard = resource.prlimit(place.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(place.pid, resource.RLIMIT_NOFILE, (1024, hard))
        before, taken = sgd.stats(), 0
        floods = [
            UnauthenticatedConnections(address, family)
            for address in {*cluster.ends, *cluster.listening}
            if address.port
        ]

        def open_all() -> None:
            while not stopped.is_set() and any(flood.made < 10_000 for flood in floods):
                for flood in floods:
                    flood.open_more(20)

        stopped = threading.Event()
        opener = threading.Thread(target=open_all)
        opener.start()
        try:
            while opener.is_alive():
                sgd.fit(steps=20, progress=False)
                taken += 20
        finally:
            stopped.set()
            opener.join()
            for flood in floods:
                flood.close()
        after = sgd.stats()
    assert (after.step, after.replaced, after.generation) == (
        before.step + taken,
        0,
        before.generation,
    )
    assert after.refused - before.refused > MOST_OPENINGS
    for process, nbytes in after.memory.items():
        assert nbytes - before.memory[process] < 50 << 20, process
