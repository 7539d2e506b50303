"""Every mode on real processes: the replay of the log gives the same bits, over both transports."""

from __future__ import annotations

import pytest
import torch

from steepest import DistributedSGD, ParameterServerStrategy, RunConfig
from steepest.errors import ConfigurationError
from steepest.testing import linear_model_creator, replay
from tests.reference import same_bits

pytestmark = pytest.mark.usefixtures("anywhere")
LOGGED = RunConfig(keep_log=True)
CREATOR = linear_model_creator(
    samples=48, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
)


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServerStrategy(mode="async", num_servers=2, chunk_bytes=32),
        ParameterServerStrategy(mode="async", transport="tcp"),
        ParameterServerStrategy(mode="ssp", staleness=1, correction="learning_rate"),
        ParameterServerStrategy(backup_workers=1),
    ],
    ids=["async", "async by calls", "ssp", "backup"],
)
def test_a_run_is_replayed_to_the_same_bits(strategy: ParameterServerStrategy) -> None:
    with DistributedSGD(CREATOR, num_workers=3, strategy=strategy, run_config=LOGGED) as trainer:
        assert trainer.step().step == 1
        last = trainer.fit(steps=20, progress=False)
        assert last.step == 21
        weights = trainer.weights()
        log = trainer.log()
        assert same_bits(replay(log, CREATOR), weights)
        on_workers = trainer.foreach_model(
            lambda model: {n: p.detach().clone() for n, p in model.module.named_parameters()}
        )
        assert all(same_bits(found, weights) for found in on_workers)  # evaluate sees the newest
        stats = trainer.stats()
        per_step = 3 if strategy.mode != "sync" else 1
        assert (stats.step, stats.version) == (21, 21 * per_step) == (21, len(log.commits))
        counted = [late for commit in log.commits for late in commit.staleness]
        assert sum(stats.staleness.histogram.values()) == len(counted)
        assert stats.staleness.max == max(counted)
        assert stats.samples == 4 * len(counted)


def test_asynchronous_training_with_one_worker_is_serial() -> None:
    with (
        DistributedSGD(CREATOR, strategy="async") as asynchronous,
        DistributedSGD(CREATOR, strategy="ps") as serial,
    ):
        for trainer in (asynchronous, serial):
            trainer.fit(steps=15, progress=False)
        assert same_bits(asynchronous.weights(), serial.weights())
        assert asynchronous.stats().staleness.max == 0
        with pytest.raises(ConfigurationError, match="keep_log=True"):
            asynchronous.log()


def test_a_checkpoint_of_an_asynchronous_run_goes_on_in_another_mode(tmp_path: object) -> None:
    with DistributedSGD(CREATOR, num_workers=2, strategy="async", run_config=LOGGED) as trainer:
        trainer.fit(steps=6, progress=False)
        trainer.save(f"{tmp_path}/checkpoint")
        weights = trainer.weights()
        trainer.restore(f"{tmp_path}/checkpoint")
        trainer.step()
        log = trainer.log()
        with pytest.raises(ConfigurationError, match="set or restored"):
            replay(log, CREATOR)
    with DistributedSGD(CREATOR, num_workers=2, strategy="ps") as other:
        other.restore(f"{tmp_path}/checkpoint")
        assert same_bits(other.weights(), weights)
        assert other.step().step == 7
