"""DistributedSGD on processes: equal to serial training, and every call keeps its word."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    ParameterServerStrategy,
    SimpleStrategy,
    StepResult,
)
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError, ShutdownError
from steepest.testing import InProcessCluster
from tests.living import places_of
from tests.reference import Task, difference, same_bits, samples, sgd

pytestmark = pytest.mark.usefixtures("machine_of_module")

PS = ParameterServerStrategy(num_servers=2, chunk_bytes=64)
PLAIN = Task(optimizer=sgd(momentum=0.9))


def mean_absolute_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean()


class Net(nn.Module):
    """Buffers, random state and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.2)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decode(self.dropout(torch.relu(self.norm(self.encode(x))))))


TASK = Task(Net, sgd(lr=0.05, momentum=0.9), samples(16), metrics={"mae": mean_absolute_error})
STEPS_PER_EPOCH = 4
SAMPLES = 4


# -- equal to serial training ------------------------------------------------------------------------


def all_gone(pids: list[int], seconds: float = 20.0) -> bool:
    """Whether these processes end in time."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], seconds)[0]:
                return False
        finally:
            os.close(descriptor)
    return True


def threads() -> set[str]:
    found = {each.name for each in threading.enumerate() if each.name.startswith("steepest")}
    return found - {"steepest clock", "steepest template"}  # they are the process', and stay


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("strategy", "workers", "devices"),
    [
        ("ps", 1, 1),
        (PS, 2, 2),
        (PS, 3, 1),
        ("allreduce", 1, 1),
        (AllreduceStrategy(chunk_bytes=64), 2, 2),
        (AllreduceStrategy(chunk_bytes=64), 3, 1),
        ("simple", 1, 1),
        ("simple", 2, 2),
        (SimpleStrategy(), 3, 1),
    ],
)
def test_equals_serial_training(strategy: Any, workers: int, devices: int) -> None:
    before = threads()
    with DistributedSGD(PLAIN.creator(), workers, devices, strategy=strategy) as trainer:
        first = trainer.step()
        last = trainer.fit(steps=19, progress=False)
        assert (first.step, last.step) == (1, 20)
        weights = trainer.weights()
        assert list(weights) == [name for name, _ in PLAIN.module().named_parameters()]
        assert difference(weights, PLAIN.train(workers * devices, 20)) < 1e-12
        config = trainer.strategy
        pids = [place.pid for place in places_of(trainer).values()]
        assert len(pids) == workers + (2 if strategy is PS else 0)
        assert threads() > before
    again = InProcessCluster(
        PLAIN.creator(), num_workers=workers, devices_per_worker=devices, strategy=config
    )
    again.step(20)
    assert same_bits(weights, again.weights())  # two runs with one seed
    assert threads() == before
    assert all_gone(pids)
    trainer.shutdown()
    for use in (
        trainer.step,
        trainer.weights,
        trainer.stats,
        trainer.warmup,
        lambda: trainer.fit(steps=1),
    ):
        with pytest.raises(ShutdownError, match="shut down"):
            use()


def test_seeds_and_leaving_by_an_error() -> None:
    before = threads()
    with pytest.raises(ZeroDivisionError), DistributedSGD(PLAIN.creator(), seed=1) as trainer:  # noqa: PT012
        pids = trainer.foreach_worker(lambda view: view.pid)
        trainer.fit(steps=5, progress=False)
        weights = trainer.weights()
        raise ZeroDivisionError
    assert difference(weights, PLAIN.train(1, 5, seed=1)) < 1e-12
    assert difference(weights, PLAIN.train(1, 5, seed=0)) > 0.01
    assert threads() == before
    assert all_gone(pids)


# -- what every call does ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[PS, SimpleStrategy()], ids=["ps", "simple"])
def shared(
    request: pytest.FixtureRequest,
    machine_of_module: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[DistributedSGD, Path]]:
    path = tmp_path_factory.mktemp("initial")
    with DistributedSGD(TASK.creator(), num_workers=2, strategy=request.param) as trainer:
        trainer.save(path)
        yield trainer, path


@pytest.fixture
def trainer(shared: tuple[DistributedSGD, Path]) -> DistributedSGD:
    """As it was in the beginning."""
    trainer, path = shared
    trainer.restore(path)
    return trainer


def reference(steps: int, strategy: Strategy) -> tuple[Any, list[StepResult]]:
    """Weights and results of an uninterrupted run."""
    cluster = InProcessCluster(TASK.creator(), num_workers=2, strategy=strategy)
    found = cluster.step(steps)
    results = [
        StepResult.from_result(result, (result.step - 1) // STEPS_PER_EPOCH) for result in found
    ]
    return cluster.weights(), results


class Recorder(Callback):
    """Writes down what it is called with, and may do something then."""

    def __init__(
        self, name: str, log: list[Any], do: Callable[[Any, StepResult], Any] = lambda *_: None
    ) -> None:
        self.name, self.log, self.do = name, log, do

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        self.log.append((self.name, "begin", steps))

    def on_step(self, sgd: Any, result: StepResult) -> None:
        self.log.append((self.name, "step", result.step))
        self.do(sgd, result)

    def on_fit_end(self, sgd: Any) -> None:
        self.log.append((self.name, "end"))


class EpochRecorder(Recorder):
    def on_epoch_end(self, sgd: Any, result: StepResult) -> None:
        self.log.append((self.name, "epoch", result.epoch, result.step))
        self.do_at_epoch_end(sgd, result)

    def do_at_epoch_end(self, sgd: Any, result: StepResult) -> None:
        """Override."""


def test_results_of_steps(trainer: DistributedSGD) -> None:
    weights, expected = reference(6, trainer.strategy)
    for number, wanted in enumerate(expected, start=1):
        result = trainer.step(fetch_stats=number != 3)
        assert (result.step, result.epoch, result.samples, result.staleness) == (
            number,
            (number - 1) // 4,
            4,
            (0, 0),
        )
        if number == 3:
            assert result.loss != result.loss
            assert result.metrics == result.timings == {}
        else:
            assert (result.loss, result.metrics) == (wanted.loss, wanted.metrics)
            assert result.timings.keys() == {"data", "compute", "wait"}
            assert all(0 <= seconds < 60 for seconds in result.timings.values())
    assert same_bits(trainer.weights(), weights)


def test_fit_calls_back_in_order(
    trainer: DistributedSGD, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[Any] = []
    last = trainer.fit(steps=3, callbacks=[Recorder("a", log), Recorder("b", log)])
    calls = [("begin", 3), ("step", 1), ("step", 2), ("step", 3), ("end",)]
    assert log == [(name, *call) for call in calls for name in "ab"]
    assert last == StepResult(
        *(3, 0, last.loss, last.metrics, SAMPLES, (0, 0), last.timings, last.gradient_norm),
        learning_rate=last.learning_rate,
    )
    assert len(last.learning_rate) == 1
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert f"loss {last.loss:.4f}" in shown
    for wrong in ({}, {"steps": 1, "epochs": 1}, {"steps": 0}, {"epochs": -1}):
        with pytest.raises(ConfigurationError):
            trainer.fit(**wrong)  # type: ignore[arg-type]


def test_between_epochs_a_callback_may_evaluate_and_save(
    trainer: DistributedSGD, tmp_path: Path
) -> None:
    seen: list[Any] = []

    class Between(EpochRecorder):
        def do_at_epoch_end(self, sgd: Any, result: StepResult) -> None:
            before = sgd.weights()
            seen.append(sgd.evaluate(samples(5)))
            sgd.save(tmp_path / str(result.epoch))
            assert sgd.stats().step == result.step
            assert same_bits(sgd.weights(), before)

    log: list[Any] = []
    trainer.fit(steps=2, progress=False)
    trainer.fit(epochs=2, callbacks=[Between("a", log)], progress=False)
    steps = [("a", "step", step) for step in range(3, 9)]
    assert log == [
        ("a", "begin", 6),
        *steps[:2],
        ("a", "epoch", 0, 4),
        *steps[2:],
        ("a", "epoch", 1, 8),
        ("a", "end"),
    ]
    weights, _ = reference(8, trainer.strategy)
    assert same_bits(trainer.weights(), weights)
    trainer.restore(tmp_path / "0")
    assert trainer.evaluate(samples(5)) == seen[0] != seen[1]
    assert trainer.step().step == 5


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_a_callback_raises_ends_the_training_between_two_steps(
    trainer: DistributedSGD, error: type[BaseException]
) -> None:
    def stop(sgd: Any, result: StepResult) -> None:
        if result.step == 3:
            while sgd.stats().step < 10:
                pass  # workers go on meanwhile
            raise error

    log: list[Any] = []
    before = trainer.stats()
    with pytest.raises(error):
        trainer.fit(steps=100_000, callbacks=[Recorder("a", log, stop)], progress=False)
    assert log[-2:] == [("a", "step", 3), ("a", "end")]
    after = trainer.stats()
    assert 10 <= after.step < 100_000
    assert (
        after.samples - before.samples == SAMPLES * after.step
    )  # those committed meanwhile count too
    assert trainer.step().step == after.step + 1
    weights, _ = reference(after.step + 1, trainer.strategy)
    assert same_bits(trainer.weights(), weights)


def test_on_step_may_read_weights_but_nothing_that_needs_idle_workers(
    trainer: DistributedSGD, tmp_path: Path
) -> None:
    wrong: list[Callable[[], Any]] = [
        trainer.step,
        trainer.warmup,
        trainer.state_dict,
        lambda: trainer.fit(steps=1),
        lambda: trainer.evaluate(samples(4)),
        lambda: trainer.save(tmp_path),
        lambda: trainer.restore(tmp_path),
        lambda: trainer.set_weights({}),
        lambda: trainer.for_model(id),
    ]

    def look(sgd: Any, result: StepResult) -> None:
        assert sgd.stats().step >= result.step
        assert all(bool(w.isfinite().all()) for w in sgd.weights().values())
        for call in wrong:
            with pytest.raises(ConfigurationError, match="on_epoch_end"):
                call()

    trainer.fit(steps=3, callbacks=[Recorder("a", [], look)], progress=False)
    assert trainer.step().step == 4


def test_evaluation_equals_one_process(trainer: DistributedSGD) -> None:
    trainer.fit(steps=3, progress=False)
    states = trainer.foreach_model(lambda model: model.state())
    assert not torch.equal(states[0]["norm.running_mean"], states[1]["norm.running_mean"])
    module = Net()
    module.load_state_dict(trainer.state_dict(), strict=True)
    assert module.decode.weight is module.encode.weight
    mean = (states[0]["norm.running_mean"] + states[1]["norm.running_mean"]) / 2
    assert torch.allclose(module.norm.running_mean, mean, rtol=1e-12)
    assert int(module.norm.num_batches_tracked) == 3
    module.eval()
    for count, batch_size in ((11, None), (7, 3), (1, 2)):
        x, y = samples(count)
        found = trainer.evaluate((x, y), batch_size)
        assert found.samples == count
        with torch.no_grad():
            output = module(x)
        assert found.loss == pytest.approx(float(nn.functional.mse_loss(output, y)), rel=1e-12)
        assert found.metrics == {
            "mae": pytest.approx(float(mean_absolute_error(output, y)), rel=1e-12)
        }
    for state, kept in zip(states, trainer.foreach_model(lambda model: model.state()), strict=True):
        assert same_bits(state, kept)
    with pytest.raises(ConfigurationError):
        trainer.evaluate(samples(0))
    trainer.fit(steps=3, progress=False)
    weights, _ = reference(6, trainer.strategy)
    assert same_bits(trainer.weights(), weights)


def test_weights_may_be_read_by_another_thread_while_training_goes_on(
    trainer: DistributedSGD,
) -> None:
    shapes = {name: weight.shape for name, weight in trainer.weights().items()}
    enough = threading.Event()
    found: list[dict[str, torch.Tensor]] = []

    def read() -> None:
        while len({float(w["head.bias"][0]) for w in found}) <= 3:
            found.append(trainer.weights())
        enough.set()

    def stop(sgd: Any, result: StepResult) -> None:
        if enough.is_set():
            raise StopIteration

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.raises(StopIteration):
        trainer.fit(steps=1_000_000, callbacks=[Recorder("a", [], stop)], progress=False)
    reader.join(60)
    for weights in found:
        assert {name: weight.shape for name, weight in weights.items()} == shapes
        assert all(bool(weight.isfinite().all()) for weight in weights.values())
    assert len({float(weights["head.bias"][0]) for weights in found}) > 3


def test_set_weights(trainer: DistributedSGD) -> None:
    trainer.fit(steps=2, progress=False)
    before = trainer.weights()
    tied = torch.arange(9, dtype=torch.float64).reshape(3, 3)
    trainer.set_weights({"decode.weight": tied, "head.bias": torch.zeros(2)})
    expected = before | {"encode.weight": tied, "head.bias": torch.zeros(2, dtype=torch.float64)}
    assert same_bits(trainer.weights(), expected)
    for part in trainer.foreach_model(
        lambda m: {n: p.detach().clone() for n, p in m.module.named_parameters()}
    ):
        assert same_bits(part, expected)
    for wrong, message in (
        (
            {"head.bias": torch.ones(2), "head.wait": torch.ones(1)},
            "no parameter is named 'head.wait'",
        ),
        ({"head.bias": torch.ones(3)}, r"'head.bias' has shape \(3,\), the model's has \(2,\)"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            trainer.set_weights(wrong)
    assert same_bits(trainer.weights(), expected)
    assert trainer.step().step == 3
    assert not same_bits(trainer.weights(), expected)


def test_functions_run_where_the_models_live(trainer: DistributedSGD) -> None:
    views = trainer.foreach_worker(lambda view: (view.index, view.pid, view.host, len(view.models)))
    assert [(index, count) for index, _, _, count in views] == [(0, 1), (1, 1)]
    assert len({os.getpid(), *(pid for _, pid, _, _ in views)}) == 3
    trainer.step()
    head = trainer.weights()["head.bias"]
    for found in (*trainer.foreach_model(bias_of_head), trainer.for_model(bias_of_head)):
        assert torch.equal(found, head)
    marked = trainer.for_model(lambda model: setattr(model, "mark", 1) or os.getpid())
    assert marked == views[0][1]
    assert trainer.foreach_model(lambda model: hasattr(model, "mark")) == [True, False]


def bias_of_head(model: Any) -> torch.Tensor:
    return model.module.head.bias.detach().clone()


def test_warmup_changes_nothing_and_stats_count(trainer: DistributedSGD) -> None:
    began = trainer.stats()
    trainer.warmup()
    trainer.fit(steps=3, progress=False)
    state = trainer.state_dict()
    trainer.warmup()
    assert same_bits(trainer.state_dict(), state)
    trainer.fit(steps=3, progress=False)
    weights, _ = reference(6, trainer.strategy)
    assert same_bits(trainer.weights(), weights)
    stats = trainer.stats()
    bytes_of_weights = sum(weight.numel() * 8 for weight in weights.values())
    assert (stats.step, stats.generation, stats.refused) == (6, began.generation, 0)
    assert stats.samples - began.samples == 6 * SAMPLES
    assert stats.bytes_pushed - began.bytes_pushed == 6 * 2 * bytes_of_weights
    assert stats.bytes_pulled - began.bytes_pulled >= 6 * 2 * bytes_of_weights
    assert {f"worker {i}" for i in range(2)} <= stats.memory.keys()
    assert all(50e6 < size < 5e9 for size in stats.memory.values())
    assert (stats.num_workers, stats.num_servers) == (2, trainer.num_servers)
    assert stats.seconds > began.seconds
    assert stats.samples_per_second == stats.samples / stats.seconds
