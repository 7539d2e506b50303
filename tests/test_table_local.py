"""Embedding tables under local SGD: a round's gradients of rows reach the servers at its end."""

from __future__ import annotations

import pytest

from steepest.config.strategies import LocalStrategy, ParameterServerStrategy
from steepest.testing import InProcessCluster
from tests.reference import difference
from tests.test_look_ahead import Net as Noisy
from tests.test_look_ahead import creator, falling, row_of, shards


def quiet() -> Noisy:
    """Without dropout, whose noise differs with the numbers of updates."""
    return Noisy(noise=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("servers", [None, 2])
def test_with_one_update_in_a_round_it_is_synchronous_training(
    workers: int, servers: int | None
) -> None:
    local = InProcessCluster(
        creator(quiet),
        num_workers=workers,
        strategy=LocalStrategy(sync_every=1, num_servers=servers),
    )
    together = InProcessCluster(
        creator(quiet), num_workers=workers, strategy=ParameterServerStrategy(num_servers=2)
    )
    local.step(6)
    together.step(6)
    assert difference(local.weights(), together.weights()) < 1e-6
    for mine, other in zip(
        sorted(shards(local), key=lambda held: held.chunk.index),
        sorted(shards(together), key=lambda held: held.chunk.index),
        strict=True,
    ):
        ours, theirs = mine.rows.export(), other.rows.export()
        assert (ours.ids == theirs.ids).all()
        assert ours.values == pytest.approx(theirs.values, abs=1e-6)


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_get_the_sum_of_a_rounds_updates(workers: int) -> None:
    strategy = LocalStrategy(sync_every=3)
    cluster, modules = falling(None, workers=workers, strategy=strategy)
    cluster.step(4)
    assert row_of(cluster) == -12
    seen = modules[0].seen
    assert seen == [-3.0 * (step // 3) for step in range(12)]  # as of the round's beginning
