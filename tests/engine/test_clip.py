"""Clipping by the global norm: as torch.nn.utils.clip_grad_norm_ on the whole gradient, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from steepest import DistributedSGD, RunConfig, TorchModel
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure, Result
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError
from steepest.observe.results import StepResult
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.testing import InProcessCluster, replay
from tests.engine.equivalence_tasks import (
    TASKS,
    Sometimes,
    Tied,
    all_but_fixed,
    run,
    weighted_mse,
    weighted_samples,
)
from tests.inside import gradient_of
from tests.modes import EACH, MODES, Moody, check, make, serial, trained
from tests.own_rules import PairsStrategy
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import OptimizerFactory, Task, difference, perceptron, same_bits, samples, sgd

STEPS = 20
CLIP = 0.6
CLIPPING = [name for name in MODES if name != "backup"]


def clipped(task: Task, norms: list[float] | None = None, clip_norm: float = CLIP) -> Task:
    """The task whose optimizer clips before each step, for serial training; `norms` takes what torch returns."""

    def create(
        module: torch.nn.Module, optimizer: OptimizerFactory = task.optimizer
    ) -> torch.optim.Optimizer:
        made = optimizer(module)
        parameters = [p for group in made.param_groups for p in group["params"]]

        def clip(*_: Any) -> None:
            norm = clip_grad_norm_(parameters, clip_norm)
            if norms is not None:
                norms.append(float(norm))

        made.register_step_pre_hook(clip)
        return made

    return replace(task, optimizer=create)


def ps(servers: int, chunk_bytes: int | None = 64, **settings: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(
        num_servers=servers, chunk_bytes=chunk_bytes, clip_norm=CLIP, **settings
    )


def norms_of(results: list[Result]) -> list[float | None]:
    return [StepResult.from_result(result, None).gradient_norm for result in results]


def compare(
    task: Task, strategy: Strategy, workers: int, devices: int = 1, **options: Any
) -> list[float]:
    """Trains by the library and serially; both clip, and tell the same norms, which are returned."""
    cluster = InProcessCluster(
        task.creator(),
        num_workers=workers,
        devices_per_worker=devices,
        strategy=strategy,
        **options,
    )
    results = trained(cluster, STEPS)
    norms: list[float] = []
    expected = clipped(task, norms).train(workers * devices * options.get("accumulate", 1), STEPS)
    assert difference(cluster.weights(), expected) < 1e-12
    assert norms_of(results) == pytest.approx(norms, rel=1e-11)
    return norms


@pytest.mark.few(2)
@grid(
    workers=[1, 2, 3],
    servers=[1, 2, 3],
    chunk_bytes=[16, 64, None],
    name=["momentum", "adamw-groups-schedule"],
)
def test_parameter_server_equals_serial_training(
    workers: int, servers: int, chunk_bytes: int, name: str
) -> None:
    norms = compare(TASKS[name], ps(servers, chunk_bytes), workers)
    assert min(norms) < CLIP < max(norms)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "strategy", [AllreduceStrategy(chunk_bytes=64, clip_norm=CLIP), SimpleStrategy(clip_norm=CLIP)]
)
@pytest.mark.parametrize(("workers", "devices"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_allreduce_and_simple_equal_serial_training(
    strategy: Strategy, workers: int, devices: int
) -> None:
    compare(TASKS["momentum"], strategy, workers, devices)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", [ps(2), AllreduceStrategy(chunk_bytes=64, clip_norm=CLIP)])
@pytest.mark.parametrize(
    ("workers", "devices", "accumulate"), [(1, 1, 3), (2, 1, 2), (2, 2, 2), (3, 1, 2)]
)
def test_the_sum_of_micro_batches_is_clipped(
    strategy: Strategy, workers: int, devices: int, accumulate: int
) -> None:
    compare(TASKS["momentum"], strategy, workers, devices, accumulate=accumulate)


COUNTED = {
    "tied": Task(Tied, sgd(momentum=0.9)),
    "frozen-and-none": Task(
        Sometimes, all_but_fixed(torch.optim.AdamW, lr=0.01, weight_decay=0.1), batch_size=1
    ),
    "weighted": Task(
        data=weighted_samples([1.0, 0.5, 3.0, 2.0, 7.0, 0.25, 1.5, 2.5, 4.0, 1.0, 0.125, 6.0]),
        loss=weighted_mse,
    ),
}


@pytest.mark.few(3)
@grid(name=COUNTED, chunk_bytes=[64, None], size=[(1, 1), (1, 2), (2, 2), (3, 1)])
def test_what_counts_counts_once(name: str, size: tuple[int, int], chunk_bytes: int | None) -> None:
    assert min(compare(COUNTED[name], ps(2, chunk_bytes), *size)) > 0


@pytest.mark.parametrize(
    "hosts", [HostMap((0, 0, 1), (0, 1), gathers=True), HostMap((0, 0, 0), (0, 0), gathers=True)]
)
def test_hosts_that_add_up_first(hosts: HostMap) -> None:
    compare(TASKS["momentum"], ps(2), 3, hosts=hosts)


@pytest.mark.few(7)
@grid(name=CLIPPING, size=[(1, 2), (2, 1), (3, 1), (3, 2)], accumulate=[1, 2])
@seeds(1)
def test_the_log_replayed_gives_the_weights_of_the_run_bit_for_bit(
    name: str, size: tuple[int, int], accumulate: int, seed: int
) -> None:
    task = Task(optimizer=sgd(momentum=0.9), data=samples(31))
    cluster = make(
        name, task, *size, settings={"clip_norm": CLIP}, shuffle=seed, accumulate=accumulate
    )
    trained(cluster, 2)
    trained(cluster, 2)
    log = check(cluster, task)
    factors = {commit.clip for commit in log.commits}
    assert max(factors) <= 1.0
    assert len(factors) > 1


@pytest.mark.few(2)
@pytest.mark.parametrize("wire_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["sync", "allreduce", "async"])
def test_what_travels_narrow_is_clipped_as_it_arrives(name: str, wire_dtype: str) -> None:
    task = Task(
        lambda: perceptron(torch.float32), sgd(momentum=0.9), samples(31, dtype=torch.float32)
    )
    servers = (0, 1, 1) if name == "allreduce" else (0, 1)
    hosts = HostMap((0, 1, 1), servers, gathers=name != "async")
    cluster = make(
        name,
        task,
        3,
        settings={"clip_norm": CLIP, "wire_dtype": wire_dtype},
        hosts=hosts,
        accumulate=2,
    )
    results = trained(cluster, 8)
    log = check(cluster, task)
    assert min(commit.clip for commit in log.commits) < 1
    if name != "async":
        norms: list[float] = []
        clipped(task, norms).train(6, 8)
        assert norms_of(results) == pytest.approx(norms, rel=0.1)


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("name", EACH)
@seeds(2)
def test_asynchronously_each_push_is_clipped_by_itself(name: str, seed: int) -> None:
    task = Task(optimizer=sgd(momentum=0.9), data=samples(36))
    cluster = make(name, task, 3, settings={"clip_norm": CLIP}, shuffle=seed)
    results, norms, job = [], [], cluster.job
    while not norms or not min(norms) < CLIP < max(norms):  # the first may all be clipped
        results += trained(cluster, 8)
        norms.clear()
        log = cluster.log()
        expected = serial(clipped(task, norms), log, job.plan(), job.shares, job.versions_per_step)
    assert difference(cluster.weights(), expected) < 1e-12
    assert [commit.clip for commit in log.commits] == pytest.approx(
        [min(1, CLIP / (n + 1e-6)) for n in norms]
    )
    assert norms_of(results) == pytest.approx(
        [sum(norms[i : i + 3]) / 3 for i in range(0, len(norms), 3)]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sync", "allreduce"])
@seeds(2, "shuffle")
def test_message_order_changes_no_bit(name: str, shuffle: int) -> None:
    task = Task(optimizer=sgd(momentum=0.9))
    straight, shuffled = (
        make(name, task, 3, servers=3, settings={"clip_norm": CLIP}, shuffle=seed)
        for seed in (None, shuffle)
    )
    norms = norms_of(trained(straight, 10))
    assert norms == norms_of(trained(shuffled, 10))
    assert same_bits(straight.weights(), shuffled.weights())


def test_what_need_not_be_clipped_is_left_alone() -> None:
    task = TASKS["momentum"]
    plain, long = (
        run(task, STEPS, 3, strategy=replace(ps(2), clip_norm=norm)) for norm in (None, 1e6)
    )
    assert same_bits(plain.weights(), long.weights())


@pytest.mark.parametrize("workers", [1, 3])
def test_gradients_stay_as_they_were_pushed(workers: int) -> None:
    """They may lie in the memory of others, who read them there."""
    plain, short = (
        run(TASKS["momentum"], 1, workers, strategy=replace(ps(2), clip_norm=norm))
        for norm in (None, 1e-3)
    )
    assert not same_bits(plain.weights(), short.weights())
    for a, b in zip(plain.workers, short.workers, strict=True):
        assert torch.equal(gradient_of(a), gradient_of(b))


@pytest.mark.parametrize("name", ["sync", "allreduce", "async"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite(name: str, value: float) -> None:
    """Passed on, it makes of the gradient what torch makes of it; skipped, it is not clipped."""
    calls = [0]

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return gradient * value if calls[0] == 3 else gradient

    def task() -> Task:
        calls[0] = 0
        return Task(lambda: Moody(poison), sgd(momentum=0.9), samples(12))

    def train(nonfinite: str, steps: int) -> tuple[InProcessCluster, list[Result]]:
        cluster = make(name, task(), 1, settings={"clip_norm": CLIP, "nonfinite": nonfinite})
        return cluster, trained(cluster, steps)

    cluster, results = train("pass", 3)
    norms: list[float] = []
    expected = clipped(task(), norms).train(1, 3)
    assert any(bool(weight.isnan().any()) for weight in expected.values())
    for key, weight in cluster.weights().items():
        assert torch.allclose(weight, expected[key], rtol=1e-12, atol=0, equal_nan=True)
    assert norms_of(results) == pytest.approx(norms, nan_ok=True)
    cluster, results = train("skip", 4)
    assert all(bool(weight.isfinite().all()) for weight in cluster.weights().values())
    assert [commit.skipped for commit in cluster.log().commits] == [False, False, True, False]
    assert cluster.log().commits[2].clip == 1.0


def test_the_norm_is_told_where_it_is_known() -> None:
    for name, known in (("sync", True), ("async", True), ("backup", False)):
        assert [norm is not None for norm in norms_of(trained(make(name), 3))] == [known] * 3
    passing = make("sync", settings={"nonfinite": "pass"})
    assert norms_of(trained(passing, 3)) == norms_of(trained(make("sync"), 3))


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "1"])
@pytest.mark.parametrize("strategy", [SimpleStrategy, ParameterServerStrategy, AllreduceStrategy])
def test_bounds_that_make_no_sense_are_refused(strategy: Any, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"clip_norm={value!r}: give a positive number"):
        strategy(clip_norm=value)


def test_backup_workers_are_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"clip_norm=1.0 where .*\(backup_workers=\).*leave one of them out",
    ):
        ParameterServerStrategy(clip_norm=1.0, backup_workers=1)


class Says(TorchModel):
    """A model that says the greatest norm of each update itself, whose gradient has norm 200."""

    clip_step = 1.0


def saying(worker: int, device: int) -> TorchModel:
    module = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(module.weight)
    data = torch.full((64, 4), 100.0), torch.zeros(64)
    optimizer = sgd(lr=1.0)
    return Says(module, loss=lambda o, t: o.mean(), data=data, batch_size=4, optimizer=optimizer)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("nonfinite", ["refuse", "pass"])
@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServerStrategy(num_servers=2, chunk_bytes=8),
        ParameterServerStrategy(mode="async"),
        AllreduceStrategy(),
        AllreduceStrategy(sharded=False),
    ],
    ids=str,
)
def test_a_model_may_say_the_norm_of_each_update(
    strategy: Any, nonfinite: str, workers: int
) -> None:
    cluster = InProcessCluster(
        saying, num_workers=workers, strategy=replace(strategy, nonfinite=nonfinite)
    )
    cluster.step(2)
    each = -0.5 * cluster.coordinator.version  # of each weight, in an update of norm 1
    assert difference(cluster.weights(), {"weight": torch.full((1, 4), each)}) < 1e-6


def test_a_norm_that_will_not_be_known_is_refused() -> None:
    """Of several gradients, chosen as they come: by the model, a strategy's setting, a rule of a user's own."""
    backup = ParameterServerStrategy(num_servers=1, backup_workers=1)
    (failure,) = InProcessCluster(saying, num_workers=3, strategy=backup).step(1)
    assert isinstance(failure, Failure)
    assert failure.kind == "ConfigurationError"
    assert "clip_step=1.0 where not every worker's gradient" in failure.error
    one = InProcessCluster(saying, num_workers=2, strategy=backup)  # the first one is an update
    one.step(1)
    assert difference(one.weights(), {"weight": torch.full((1, 4), -0.5)}) < 1e-6
    with pytest.raises(ConfigurationError, match=r"clip_norm=0.1 with rule CommitPairs"):
        InProcessCluster(saying, num_workers=4, strategy=PairsStrategy(clip_norm=0.1))


@pytest.mark.few(1)
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "strategy",
    [ps(2), AllreduceStrategy(chunk_bytes=64, clip_norm=CLIP), SimpleStrategy(clip_norm=CLIP)],
)
def test_on_ray(strategy: Strategy) -> None:
    task = TASKS["momentum"]
    norms: list[float] = []
    expected = clipped(task, norms).train(4, 6)
    run_config = RunConfig(keep_log=True)
    with DistributedSGD(
        task.creator(), 2, accumulate=2, strategy=strategy, run_config=run_config
    ) as trainer:
        assert [trainer.step().gradient_norm for _ in range(6)] == pytest.approx(norms, rel=1e-11)
        assert difference(trainer.weights(), expected) < 1e-12
        assert same_bits(trainer.weights(), replay(trainer.log(), task.creator()))


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [ParameterServerStrategy(), LocalStrategy(sync_every=2)])
def test_models_may_ask_for_clipping_where_the_strategy_does_not(strategy: Any) -> None:
    task = Task(optimizer=sgd(lr=0.1), data=samples(24), batch_size=3)

    def create(worker: int, device: int) -> Any:
        model: Any = task.creator()(worker, device)
        model.clip_norm = CLIP
        return model

    def weights(creator: Any, config: Any) -> dict[str, torch.Tensor]:
        cluster = InProcessCluster(creator, num_workers=2, strategy=config)
        cluster.step(4)
        return cluster.weights()

    own = weights(create, strategy)
    assert same_bits(own, weights(task.creator(), replace(strategy, clip_norm=CLIP)))
    assert not same_bits(own, weights(create, replace(strategy, clip_norm=0.5 * CLIP)))
    assert not same_bits(own, weights(task.creator(), strategy))
