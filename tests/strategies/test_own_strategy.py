"""The seam of strategies: what all promise, and training with a codec, an update and a rule of one's own."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle
from torch import nn

from examples.own_strategy import MajorityVote, Votes
from steepest import AllreduceStrategy, Codec, DistributedSGD, ParameterServerStrategy, Strategy
from steepest.core.data.sampler import SamplePlan
from steepest.core.strategies import allreduce as dense_allreduce
from steepest.core.strategies import parameter_server as dense_ps
from steepest.errors import ConfigurationError, ModelRaisedError
from steepest.strategies.named import as_strategy, renewed
from steepest.strategies.names import STRATEGY_NAMES
from steepest.testing import InProcessCluster, replay
from tests.own_rules import PairsStrategy, TwoThirdsStrategy
from tests.reference import Task, Weights, difference, same_bits, samples, sgd, snapshot
from tests.simulation.run import Simulation, run_config
from tests.struck_jobs import DIED


class Median(Codec):
    """Gradients as they are, of which each element's median is the update (Yin et al. 2018, arXiv:1803.01498)."""

    everywhere = True

    def size(self, layout: Any, chunk: Any) -> int:
        return int(chunk.nbytes)

    def pack(self, layout: Any, chunk: Any, values: Any, out: Any, factors: Any) -> bool:
        out.view(torch.float32).copy_(values)
        return True

    def add(self, layout: Any, chunk: Any, packed: Any, out: torch.Tensor) -> None:
        out.add_(torch.stack([payload.view(torch.float32) for payload, _ in packed]).median(0)[0])


@dataclass(frozen=True, kw_only=True)
class MedianStrategy(ParameterServerStrategy):
    """The median over the workers takes the place of the mean."""

    name = "median"

    @property
    def codec(self) -> Codec:
        return Median()


OWN: dict[str, Strategy] = {
    "vote": MajorityVote(chunk_bytes=64),
    "median": MedianStrategy(num_servers=2, chunk_bytes=64),
    "pairs": PairsStrategy(num_servers=2, chunk_bytes=64),
    "thirds": TwoThirdsStrategy(num_servers=2, chunk_bytes=64),
}
ALL = {name: as_strategy(name) for name in STRATEGY_NAMES} | OWN
TASK = Task(
    lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)),
    sgd(0.05),
    samples(24, dtype=torch.float32),
)


@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
class TestContract:
    """What the engine relies on, for the library's strategies and a user's."""

    def test_it_is_a_value(self, strategy: Strategy) -> None:
        with pytest.raises(FrozenInstanceError):
            strategy.clip_norm = 1.0  # type: ignore[misc]
        for other in (replace(strategy), cloudpickle.loads(cloudpickle.dumps(strategy))):
            assert other == strategy
            assert hash(other) == hash(strategy)
        assert replace(strategy, clip_norm=2.0) != strategy

    def test_its_settings_are_checked_in_subclasses_too(self, strategy: Strategy) -> None:
        with pytest.raises(ConfigurationError, match="clip_norm"):
            replace(strategy, clip_norm=-1.0)

    def test_a_step_has_pushes_and_versions(self, strategy: Strategy) -> None:
        for workers in (2, 4):
            rule = strategy.rule
            assert 1 <= rule.versions_per_step(workers) <= rule.pushes_per_step(workers) <= workers
            assert 1 <= rule.needs(workers) <= workers

    def test_it_has_servers_somewhere(self, strategy: Strategy) -> None:
        for nodes, workers in ((1, 1), (1, 3), (2, 3)):
            servers = strategy.servers_for(nodes, workers)
            assert servers >= 1
            if strategy.in_workers:
                assert servers == workers
        if not strategy.has_servers or strategy.in_workers:
            with pytest.raises(ConfigurationError, match="num_servers"):
                strategy.with_servers(2)
        else:
            assert strategy.with_servers(3).servers_for(1, 2) == 3
            assert strategy.with_at_most(1).servers_for(4, 4) == 1

    def test_what_it_pushes_is_a_codec(self, strategy: Strategy) -> None:
        assert strategy.codec is None or isinstance(strategy.codec, Codec)
        assert strategy.wire_formats is strategy.wire_formats  # one codec in a process


def cluster(name: str, workers: int, **options: Any) -> InProcessCluster:
    return InProcessCluster(
        TASK.creator(), num_workers=workers, strategy=OWN[name], keep_log=True, **options
    )


def serial(name: str, workers: int, steps: int) -> Weights:
    """The same training in one process."""
    torch.manual_seed(0)
    module = TASK.module()
    optimizer = TASK.optimizer(module)
    plan = SamplePlan(len(TASK.data[0]), workers * TASK.batch_size, 0)
    parameters = list(module.parameters())
    means = [[torch.zeros_like(p) for p in parameters] for _ in range(workers)]
    for step in range(steps):
        gradients = []
        for worker in range(workers):
            index = torch.from_numpy(plan.share(step, worker, workers))
            loss = TASK.loss(module(TASK.data[0][index]), TASK.data[1][index])
            gradients.append(torch.autograd.grad(loss, parameters))
        for at, parameter in enumerate(parameters):
            each = [gradient[at] for gradient in gradients]
            if name == "vote":
                for mean, gradient in zip(means, each, strict=True):
                    mean[at].mul_(0.9).add_(gradient)
                signs = [1.0 - 2.0 * torch.signbit(mean[at]) for mean in means]
                parameter.grad = sum(signs).sign()  # type: ignore[union-attr, arg-type]
            else:
                parameter.grad = torch.stack(each).median(0)[0]
        optimizer.step()
    return snapshot(module)


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", ["vote", "median"])
def test_own_updates_equal_serial_ones(name: str, workers: int) -> None:
    job = cluster(name, workers)
    job.step(9)
    assert difference(job.weights(), serial(name, workers, 9)) < 1e-6
    assert same_bits(replay(job.log(), TASK.creator()), job.weights())


def test_every_two_pushes_are_an_update() -> None:
    job = cluster("pairs", 4)
    job.step(6)
    log = job.log()
    assert {len(commit.pushes) for commit in log.commits} == {2}
    assert len(log.commits) == 12
    assert same_bits(replay(log, TASK.creator()), job.weights())


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_pushes_of_older_weights_are_dropped_for_a_rule_of_one_version(workers: int) -> None:
    job = cluster("thirds", workers)
    job.step(6)
    log = job.log()
    assert {len(commit.pushes) for commit in log.commits} == {max(2 * workers // 3, 1)}
    assert len(log.commits) == 6
    assert same_bits(replay(log, TASK.creator()), job.weights())


@contextlib.contextmanager
def simulated(workers: int, strategy: str | Strategy) -> Iterator[DistributedSGD]:
    """A trainer in a simulation."""
    with (
        Simulation(1).running(),
        DistributedSGD(
            TASK.creator(), workers, strategy=strategy, run_config=run_config()
        ) as trainer,
    ):
        yield trainer


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OWN)
def test_a_death_leaves_every_sample_counted_once(name: str) -> None:
    simulation = Simulation(2)
    config = run_config(keep_log=True)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 4, strategy=OWN[name], run_config=config) as trainer,
    ):
        trainer.fit(steps=3, progress=False)
        for process in simulation.living():
            if process.name == "steepest worker 1":
                simulation.world.kill(process, DIED)
        trainer.fit(steps=5, progress=False)
        assert trainer.stats().step == 8
        simulation.settle()
        assert trainer.stats().replaced == 1
        if name != "vote":  # whose successor has no running mean yet: a state that logs do not tell
            assert same_bits(replay(trainer.log(), TASK.creator()), trainer.weights())


# not "thirds": of whose pushes its updates are made depends on when they come
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["vote", "median", "pairs"])
def test_a_checkpoint_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    """The running means of voters are part of it."""
    with simulated(2, OWN[name]) as trainer:
        trainer.fit(steps=4, progress=False)
        trainer.save(tmp_path / "c")
        trainer.fit(steps=8, progress=False)
        whole = trainer.weights()
    with simulated(2, OWN[name]) as trainer:
        trainer.restore(tmp_path / "c")
        trainer.fit(steps=8, progress=False)
        resumed = trainer.weights()
    if name == "pairs":
        assert difference(resumed, whole) < 0.5  # which pushes meet is chance
    else:
        assert same_bits(resumed, whole)


def test_a_codec_without_a_form_for_a_parameter_is_refused() -> None:
    double = Task(data=samples(24))
    with pytest.raises(ConfigurationError, match=r"Votes of strategy 'majority vote' .*float64"):
        InProcessCluster(double.creator(), num_workers=2, strategy=MajorityVote())


def test_votes_are_bits() -> None:
    pickle.dumps(Votes(0.9))
    job = cluster("vote", 3)
    job.step(1)
    chunk = job.job.description.layout.chunks[0]
    assert Votes(0.9).size(None, chunk) == -(-chunk.nbytes // 32)


def test_changing_to_it_and_back() -> None:
    with simulated(3, "ps") as trainer:
        trainer.fit(steps=2, progress=False)
        trainer.set_strategy(OWN["vote"])
        trainer.fit(steps=4, progress=False)
        assert trainer.strategy == OWN["vote"]
        trainer.set_strategy(AllreduceStrategy())
        trainer.fit(steps=6, progress=False)
        assert trainer.stats().step == 12


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_codec_that_raises_at_a_server_is_told_as_a_mistake(mode: str) -> None:
    class Wrong(Median):
        def add(self, layout: Any, chunk: Any, packed: Any, out: torch.Tensor) -> None:
            raise ValueError("a mistake")

    class WrongStrategy(MedianStrategy):
        @property
        def codec(self) -> Codec:
            return Wrong()

    with (
        simulated(2, WrongStrategy(num_servers=2, mode=mode)) as trainer,
        pytest.raises(ModelRaisedError, match="ValueError: a mistake"),
    ):
        trainer.fit(steps=3, progress=False)


def test_a_strategy_that_was_pickled_as_the_cores_keeps_all_of_its_settings() -> None:
    for now, core, settings in (
        (ParameterServerStrategy, dense_ps.ParameterServerStrategy, {"wire_dtype": (None, "bf16")}),
        (AllreduceStrategy, dense_allreduce.AllreduceStrategy, {"compression": "topk"}),
    ):
        whole = now(table_staleness=2, chunk_bytes=64, **settings)  # type: ignore[arg-type]
        old = object.__new__(core)
        old.__dict__.update(vars(whole) | {"wire_formats": whole.wire_formats})
        assert renewed(pickle.loads(pickle.dumps(old))) == whole
        assert renewed(whole) is whole
        assert type(renewed(core())) is core
