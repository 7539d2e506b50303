"""The way a result travels never changes the result, also of models that write to what they own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD
from steepest.core.engine.generators import seed_everything
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure, Result
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError, ModelError, ModelRaisedError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.testing import InProcessCluster, replay
from tests.engine.own_writes import STATEFUL, WRITERS, WRITES, Momentum, Writer, trained
from tests.pairs import grid
from tests.reference import Task, same_bits
from tests.simulation.run import Simulation, run_config

WORKERS = (1, 2, 3)
SAMPLES, STEPS = 12, 4

#: whether memory is read where it lies, and on how many hosts workers and servers are; None: each
#: on one of its own
WAYS: dict[str, tuple[bool, int | None]] = {
    "sent": (False, None),
    "lent": (True, None),
    "one host": (True, 1),
    "two hosts": (True, 2),
}

#: strategies whose updates are those of one process on all the samples of a step
EXACT: dict[str, Strategy] = {
    "ps": ParameterServerStrategy(num_servers=1),
    "ps, two servers": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "ps, copies": ParameterServerStrategy(num_servers=2, chunk_bytes=64, replication=2),
    "allreduce": AllreduceStrategy(chunk_bytes=64),
    "allreduce, unsharded": AllreduceStrategy(sharded=False),
    "groups": AllreduceStrategy(data_plane="gloo", chunk_bytes=64),
    "simple": SimpleStrategy(),
}
OTHERS: dict[str, Strategy] = {
    "local": LocalStrategy(sync_every=2),
    "async": ParameterServerStrategy(mode="async", num_servers=1),
    "ssp": ParameterServerStrategy(mode="ssp", staleness=1, num_servers=2, chunk_bytes=64),
}


def task_of(module: Callable[[], nn.Module], workers: int = 1, tokens: bool = False) -> Task:
    """Twelve samples, all of them in each step; a batch's order is of no account."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    if tokens:
        x = torch.randint(0, 9, (SAMPLES, 3), generator=generator)
    data = (x, torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64))
    return Task(module, trained, data, batch_size=SAMPLES // workers)


def cluster_of(
    task: Task, workers: int, config: Strategy, way: str, **settings: Any
) -> InProcessCluster:
    lend, hosts = WAYS[way]
    servers = (
        workers
        if isinstance(config, (AllreduceStrategy, LocalStrategy))
        else config_servers(config)
    )
    where = None
    if hosts is not None:
        gathers = not isinstance(config, (AllreduceStrategy, LocalStrategy)) or hosts > 1
        where = HostMap(
            tuple(i % hosts for i in range(workers)),
            tuple(i % hosts for i in range(servers)),
            gathers,
        )
    return InProcessCluster(
        task.creator(), num_workers=workers, strategy=config, lend=lend, hosts=where, **settings
    )  # fmt: skip


def config_servers(config: Strategy) -> int:
    return getattr(config, "num_servers", None) or 1


@functools.cache
def alone(name: str) -> dict[str, torch.Tensor]:
    """What a model is after training by one worker with a server that is sent everything."""
    cluster = cluster_of(task_of(STATEFUL[name]), 1, EXACT["ps"], "sent")
    cluster.step(STEPS)
    return cluster.state_dict()


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.few(23)
@grid(name=STATEFUL, strategy=EXACT, way=WAYS, workers=WORKERS)
def test_every_way_gives_what_one_process_gives(
    name: str, strategy: str, way: str, workers: int
) -> None:
    cluster = cluster_of(task_of(STATEFUL[name], workers), workers, EXACT[strategy], way)
    results = cluster.step(STEPS)
    assert isinstance(results[-1], Result), results[-1]
    wanted = alone(name)
    if name == "batch norm" and workers > 1:  # each replica normalises by its own batch
        other = cluster_of(task_of(STATEFUL[name], workers), workers, EXACT["ps"], "sent")
        other.step(STEPS)
        wanted = other.state_dict()
    close(cluster.state_dict(), wanted)


@pytest.mark.few(4)
@pytest.mark.long
@grid(
    name=["momentum, in place", "momentum, storage", "spectral norm", "batch norm"],
    strategy=OTHERS,
    workers=WORKERS,
)
def test_with_other_updates_too_the_way_is_of_no_account(
    name: str, strategy: str, workers: int
) -> None:
    found = []
    for way in WAYS:
        cluster = cluster_of(task_of(STATEFUL[name], workers), workers, OTHERS[strategy], way)
        cluster.step(STEPS)
        found.append(cluster.state_dict())
    for other in found[1:]:
        close(other, found[0])


# -- frozen parameters that the model changes ----------------------------------------------------------


def expected(steps: int, how: str = "in place") -> dict[str, torch.Tensor]:
    """Plain training by one process."""
    task = task_of(lambda: Momentum(how))
    seed_everything(0)
    module = task.module()
    optimizer = task.optimizer(module)
    x, y = task.data
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


@pytest.mark.few(9)
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("strategy", EXACT)
def test_a_momentum_encoder_is_that_of_plain_training(how: str, strategy: str) -> None:
    cluster = cluster_of(task_of(lambda: Momentum(how), 2), 2, EXACT[strategy], "lent")
    cluster.step(STEPS)
    close(cluster.state_dict(), expected(STEPS, how))


def test_of_several_copies_the_mean_counts_and_each_replica_keeps_its_own() -> None:
    class Counting(nn.Module):
        """Its frozen parameter counts the samples that it has seen."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4).double()
            self.seen = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.data += len(x)
            return self.layer(x)

    data = tuple(torch.randn(14, n, dtype=torch.float64) for n in (3, 4))
    task = replace(
        task_of(Counting), data=data, batch_size=4
    )  # of 14 samples some replicas see four, others three
    cluster = cluster_of(task, 2, EXACT["ps"], "lent", devices_per_worker=2)
    cluster.step(6)
    states = [
        state["seen"].item() for worker in cluster.workers for state in worker._replicas.states()
    ]
    assert sum(states) == 6 * 14
    assert len(set(states)) > 1
    assert cluster.state_dict()["seen"].item() == 21
    assert cluster.weights()["seen"].item() == 0, "servers have what was installed"


def test_what_only_some_replicas_have_changed_counts_as_installed_on_the_others() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4).double()
            self.mark = nn.Parameter(
                torch.full((2,), 3.0, dtype=torch.float64), requires_grad=False
            )
            self.writes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.writes:
                self.mark.data = self.mark.data + 1
            return self.layer(x)

    cluster = cluster_of(task_of(First, 2), 2, EXACT["allreduce"], "lent")
    cluster.workers[1]._replicas.models[0].module.writes = True
    cluster.step(2)
    assert cluster.state_dict()["mark"].tolist() == [4.0, 4.0]


def test_a_successor_has_what_the_others_have() -> None:
    task = task_of(lambda: Momentum("storage"), 2)
    cluster = cluster_of(task, 2, EXACT["ps"], "lent", replaces=True)
    cluster.step(2)
    cluster.kill(1)
    cluster.step(2)
    own = [state for worker in cluster.workers for state in worker._replicas.states()]
    assert len(own) == 2
    assert all(bool((own[0][name] == own[1][name]).all()) for name in own[0])
    assert cluster.lives == [0, 1]
    close(cluster.state_dict(), expected(4))


def test_frozen_parameters_that_no_model_writes_to_are_no_state() -> None:
    cluster = cluster_of(task_of(lambda: Momentum("in place"), 2), 2, EXACT["ps"], "lent")
    cluster.step(2)
    (state, *_) = cluster.workers[0]._replicas.states()
    assert state.keys() == {"key.weight", "key.bias"}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("strategy", ["ps, two servers", "allreduce", "async", "local"])
def test_a_replay_gives_each_worker_its_own(name: str, strategy: str) -> None:
    task = task_of(STATEFUL[name], 3)
    cluster = cluster_of(task, 3, (EXACT | OTHERS)[strategy], "lent", keep_log=True)
    cluster.step(STEPS)
    parameters = cluster.weights().keys()
    wanted = {key: value for key, value in cluster.state_dict().items() if key in parameters}
    assert same_bits(replay(cluster.log(), task.creator()), wanted)


# -- trainable parameters that the model changes -------------------------------------------------------


@pytest.mark.few(15)
@grid(name=WRITERS, strategy=[*EXACT, *OTHERS], workers=[1, 2])
def test_writing_to_trained_parameters_is_refused(name: str, strategy: str, workers: int) -> None:
    module, parameter = WRITERS[name]
    config = (EXACT | OTHERS)[strategy]
    task = task_of(module, workers, tokens=name == "max norm")
    cluster = cluster_of(task, workers, config, "lent")
    before = cluster.state_dict()
    models = [model for worker in cluster.workers for model in worker._replicas.models]
    for model in models:
        model.module.writes = True
    failure = cluster.step(2)[0]
    assert isinstance(failure, Failure)
    assert (
        f"ModelError: the model has written to its trainable parameter {parameter!r}"
        in failure.error
    )
    assert same_bits(cluster.state_dict(), before), "nothing of the step is applied"
    for model in models:
        model.module.writes = False
    assert [type(result) for result in cluster.step(2)] == [Result] * 2
    fine = cluster_of(task, workers, config, "lent")
    fine.step(2)
    if config.name not in ("async", "ssp"):  # whose samples others have taken meanwhile
        close(cluster.state_dict(), fine.state_dict())
    models[0].module.writes = True
    batch = next(models[0].data.open([torch.arange(3).numpy()]))
    with pytest.raises(ModelError, match=f"trainable parameter {parameter!r}"):
        models[0].evaluate(batch)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "data"])
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "async"])
@pytest.mark.parametrize("steps", [2, 3, 6])
def test_it_is_refused_whenever_it_begins(name: str, strategy: str, steps: int) -> None:
    module, parameter = WRITERS[name]
    config = {
        "ps": EXACT["ps, two servers"],
        "allreduce": AllreduceStrategy(),
        "async": OTHERS["ssp"],
    }[strategy]
    cluster = cluster_of(task_of(module, 2, tokens=name == "max norm"), 2, config, "sent")
    cluster.step(steps)
    before = cluster.weights()
    for worker in cluster.workers:
        worker._replicas.models[0].module.writes = True
    (failure,) = cluster.step(1)
    assert parameter in failure.error
    assert same_bits(cluster.weights(), before)


def wide(how: str) -> Callable[[], nn.Module]:
    """More weights than are compared after every pass."""

    def make() -> nn.Module:
        writer = Writer(how)
        writer.first, writer.last = nn.Linear(3, 3000).double(), nn.Linear(3000, 4).double()
        return writer

    return make


@pytest.mark.few(8)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("workers", [1, 2])
def test_many_weights_are_compared_now_and_then(steps: int, workers: int) -> None:
    cluster = cluster_of(task_of(wide("data"), workers), workers, EXACT["ps"], "sent")
    cluster.step(steps)
    before = cluster.weights()
    cluster.workers[0]._replicas.models[0].module.writes = True
    (result,) = cluster.step(1)
    if steps in (0, 1, 3, 7):
        assert "'last.weight'" in result.error
        assert same_bits(cluster.weights(), before)
    else:
        assert isinstance(result, Result), "it is found later"


@pytest.mark.few(5)
@pytest.mark.parametrize("how", ["clamp", "storage"])
@pytest.mark.parametrize("strategy", ["ps", "async", "ssp", "local", "simple"])
def test_what_was_written_to_many_weights_is_sent_again(how: str, strategy: str) -> None:
    config = (EXACT | OTHERS)[strategy]
    if strategy == "ssp":  # with chunks of 64 bytes these weights would be thousands of messages
        config = replace(config, chunk_bytes=1 << 16)
    cluster = cluster_of(task_of(wide(how), 2), 2, config, "sent")
    cluster.step(4)
    before = cluster.weights()
    modules = [worker._replicas.models[0].module for worker in cluster.workers]
    for module in modules:
        module.writes = True
    (failure,) = cluster.step(1)
    assert "'last.weight'" in failure.error
    assert same_bits(cluster.weights(), before)
    for worker in cluster.workers:
        held = worker.at_version(
            failure.generation,
            failure.version,
            lambda replicas: replicas.layout.named(replicas.weights),
        )
        assert same_bits(cluster.wait(held, "weights"), before)
    for module in modules:
        module.writes = False
    assert isinstance(cluster.step(1)[0], Result)


@pytest.mark.parametrize("how", ["clamp", "storage"])
def test_where_the_model_wrote_to_the_servers_memory_the_error_says_so(how: str) -> None:
    cluster = cluster_of(task_of(wide(how)), 1, EXACT["ps"], "sent")
    cluster.step(4)
    cluster.workers[0]._replicas.models[0].module.writes = True
    (failure,) = cluster.step(1)
    assert "may keep what was written: restore() or set_weights()" in failure.error


def test_what_a_model_wrote_before_it_raised_is_undone() -> None:
    class Raising(nn.Linear):
        writes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.writes:
                with torch.no_grad():
                    self.weight.fill_(9.0)
                raise ArithmeticError("after it wrote")
            return super().forward(x)

    for strategy, workers in itertools.product(("ps", "allreduce"), (1, 2)):
        task = task_of(lambda: Raising(3, 4).double(), workers)
        cluster = cluster_of(task, workers, EXACT[strategy], "sent")
        cluster.step(1)
        module = cluster.workers[0]._replicas.models[0].module
        module.writes = True
        (failure,) = cluster.step(1)
        assert "after it wrote" in failure.error
        module.writes = False
        cluster.step(1)
        fine = cluster_of(task, workers, EXACT[strategy], "sent")
        fine.step(2)
        assert same_bits(cluster.weights(), fine.weights())


def test_batch_norm_that_cannot_be_synchronised_is_refused() -> None:
    task = task_of(lambda: nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)).double())
    with pytest.raises(ModelError, match="'1' is a SyncBatchNorm"):
        task.creator()(0, 0)


def fill(module: nn.Module) -> None:
    module[2].weight.data.fill_(0.0)  # type: ignore[index]


def initialise(module: nn.Module) -> None:
    nn.init.zeros_(module[2].weight)  # type: ignore[index]


def convert(module: nn.Module) -> None:
    module[2].half()  # type: ignore[index]


def replace_one(module: nn.Module) -> None:
    module[2].weight = nn.Parameter(torch.zeros(2, 4, dtype=torch.float64))  # type: ignore[index]


@pytest.mark.few(2)
@pytest.mark.parametrize("write", [fill, initialise, convert, replace_one])
def test_what_a_function_between_steps_writes_to_weights_is_refused_and_undone(
    write: Callable[[nn.Module], None],
) -> None:
    """Also where it raises; what the model alone has, such as buffers, may be written."""
    task = Task(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Linear(4, 2)).double())

    def between(module: nn.Module, fails: bool = False) -> None:
        write(module)
        if fails:
            raise KeyError("it failed")

    with (
        Simulation(1).running(),
        DistributedSGD(lambda *_: task.creator()(0, 0), 2, run_config=run_config()) as sgd,
    ):
        sgd.fit(steps=2, progress=False)
        before = sgd.weights()
        for each in (sgd.foreach_model, sgd.for_model, sgd.foreach_worker):
            for fails in (False, True):
                error = ModelRaisedError if fails else ConfigurationError
                said = "it failed" if fails else r"written to .*'2\.(weight|bias)'.*set_weights"
                with pytest.raises(error, match=said):
                    each(lambda m, fails=fails: between(getattr(m, "models", [m])[0].module, fails))
        seen = sgd.foreach_model(lambda model: dict(model.module.state_dict()))
        assert all(same_bits({n: w[n] for n in before}, before) for w in seen)
        sgd.foreach_model(lambda model: model.module[0].running_mean.fill_(7.0))
        assert sgd.state_dict()["0.running_mean"].tolist() == [7.0] * 3
        sgd.step()
