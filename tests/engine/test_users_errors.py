"""Mistakes of users' code, one after the other under every strategy: told as what they are, and training goes on."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from steepest import IndexedStream, TorchModel
from steepest.core.engine.step_errors import raise_step_error
from steepest.core.messages.driver import Failure, Result
from steepest.core.models.protocol import Computed
from steepest.errors import (
    ModelError,
    ModelRaisedError,
    ShutdownError,
    SteepestError,
    describe_error,
    described_error,
)
from steepest.runtime.calls import RemoteError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.testing import InProcessCluster
from tests.reference import same_bits, samples

STRATEGIES = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=32),
    "copies": ParameterServerStrategy(num_servers=2, replication=2, chunk_bytes=32),
    "allreduce": AllreduceStrategy(chunk_bytes=32),
    "replicated": AllreduceStrategy(sharded=False, chunk_bytes=32),
    "groups": AllreduceStrategy(data_plane="gloo", chunk_bytes=32),
    "local": LocalStrategy(sync_every=2),
    "async": ParameterServerStrategy(mode="async", num_servers=2, chunk_bytes=32),
    "ssp": ParameterServerStrategy(mode="ssp", staleness=1, chunk_bytes=32),
    "simple": SimpleStrategy(),
}
TOGETHER = [name for name in STRATEGIES if name not in ("async", "ssp")]


class Switch:
    """Whether the mistake is made."""

    on = False


def raising(make: Callable[[], BaseException]) -> Callable[[], None]:
    def raise_it() -> None:
        raise make()  # the user's own line

    return raise_it


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("nobody may pickle this")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class ExitingError(Exception):
    def __str__(self) -> str:
        sys.exit("even this")


def recurse() -> None:
    recurse()


def exit_by_hand() -> None:
    sys.exit(3)  # the user's own line


# -- what users write ------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A map-style dataset whose items may go wrong."""

    def __init__(self, switch: Switch, item: Callable[[], Any]) -> None:
        self.switch, self.item = switch, item
        self.x, self.y = samples(16)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return (self.item() if self.switch.on else None) or (self.x[index], self.y[index])


class Ending:
    """A source whose batches end too early."""

    size: int | None = 16

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.x, self.y = samples(16)

    def open(self, shares: Any, prefetch: bool = True) -> Iterator[Any]:
        for share in shares:
            if self.switch.on:
                return
            yield self.x[share], self.y[share]


class Own(TorchModel):
    """A model that overrides `metrics`, and one of the protocol's methods."""

    own_metrics: Callable[[], Any] | None = None
    own_computed: Callable[[Computed], Any] | None = None

    def metrics(self, batch: Any) -> Mapping[str, Any]:
        return {"fine": 1.0} if self.own_metrics is None else self.own_metrics()

    def compute_gradients(self, *arguments: Any) -> Computed:  # type: ignore[override]
        computed = super().compute_gradients(*arguments)
        return computed if self.own_computed is None else self.own_computed(computed)


class Deaf(TorchModel):
    """A model that does not tell of the gradients that it has."""

    switch: Switch

    def compute_gradients(self, batch: Any, ready: Any, *rest: Any) -> Computed:  # type: ignore[override]
        def forgetful(entry: int, *about: Any) -> None:
            if not self.switch.on or entry > 0:
                ready(entry, *about)

        return super().compute_gradients(batch, forgetful, *rest)


class Backward(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, do: Callable[[], None]) -> torch.Tensor:  # type: ignore[override]
        context.do = do
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        context.do()


def torch_model(
    switch: Switch, cls: type[TorchModel] = Own, *, data: Any = None, **settings: Any
) -> Any:
    settings.setdefault("loss", nn.functional.mse_loss)
    return cls(
        nn.Linear(3, 2).double(),
        data=samples(16) if data is None else data,
        batch_size=2,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        **settings,
    )


Make = Callable[[Switch], Any]


def loss_does(do: Callable[[], None]) -> Make:
    def make(switch: Switch) -> Any:
        def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
            if switch.on:
                do()
            return nn.functional.mse_loss(output, target)

        return torch_model(switch, loss=loss)

    return make


def loss_gives(wrong: Callable[[torch.Tensor], Any]) -> Make:
    def make(switch: Switch) -> Any:
        def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
            right = nn.functional.mse_loss(output, target)
            return wrong(right) if switch.on else right

        return torch_model(switch, loss=loss)

    return make


def backward_does(do: Callable[[], None]) -> Make:
    def make(switch: Switch) -> Any:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            right = nn.functional.mse_loss(output, target)
            return Backward.apply(right, do) if switch.on else right  # type: ignore[no-untyped-call]

        return torch_model(switch, loss=loss)

    return make


def metrics_give(wrong: Any) -> Make:
    def make(switch: Switch) -> Any:
        model = torch_model(switch)
        model.own_metrics = lambda: wrong if switch.on else {"fine": 1.0}
        return model

    return make


def metrics_do(do: Callable[[], None]) -> Make:
    def make(switch: Switch) -> Any:
        model = torch_model(switch)
        model.own_metrics = lambda: (do() if switch.on else None) or {"fine": 1.0}
        return model

    return make


def model_computes(wrong: Callable[[Computed], Any]) -> Make:
    def make(switch: Switch) -> Any:
        model = torch_model(switch)
        model.own_computed = lambda computed: wrong(computed) if switch.on else computed
        return model

    return make


def deaf(switch: Switch) -> Any:
    model = torch_model(switch, Deaf)
    model.switch = switch
    return model


def items_do(do: Callable[[], Any]) -> Make:
    return lambda switch: torch_model(switch, data=Numbers(switch, do))


def collate_does(do: Callable[[], None]) -> Make:
    def make(switch: Switch) -> Any:
        def collate(items: list[Any]) -> Any:
            if switch.on:
                do()
            return torch.utils.data.default_collate(items)

        data = Numbers(switch, lambda: None)
        return torch_model(switch, data=DataLoader(data, batch_size=2, collate_fn=collate))

    return make


def stream(do: Callable[[], bool]) -> Make:
    x, y = samples(16)

    def make(switch: Switch) -> Any:
        def begin(start: int) -> Iterator[Any]:
            for index in range(start, 16):
                if switch.on and do():
                    return
                yield x[index], y[index]

        return torch_model(switch, data=IndexedStream(begin, 16, block=1))

    return make


def read_nothing() -> bool:
    raise OSError("no such shard")  # the user's own line


@dataclass
class Mistake:
    """What is made wrong, and what is told of it: an exception's class, its words, and lines of its traceback."""

    make: Make
    words: str
    lines: tuple[str, ...] = ()
    error: type[SteepestError] = ModelRaisedError


LINE = ("# the user's own line",)


def backwards(value: torch.Tensor) -> torch.Tensor:
    value.backward()  # type: ignore[no-untyped-call]
    return value


def refused(make: Make, *words: str) -> Mistake:
    return Mistake(make, ".*".join(words), error=ModelError)


CALLED = r"the loss calls backward\(\) itself \(.*test_users_errors.py:\d+, in backwards\): return"

MISTAKES: dict[str, Mistake] = {
    "backward in the loss": refused(loss_gives(backwards), CALLED),
    "backward and a number": refused(loss_gives(lambda right: backwards(right).item()), CALLED),
    "backward and detached": refused(loss_gives(lambda right: backwards(right).detach()), CALLED),
    "loss raises": Mistake(
        loss_does(raising(lambda: ArithmeticError("no"))), "ArithmeticError: no", LINE
    ),
    "unpicklable": Mistake(
        loss_does(raising(UnpicklableError)), "UnpicklableError: it holds a lock", LINE
    ),
    "no words": Mistake(
        loss_does(raising(UnspeakableError)),
        r"UnspeakableError: \(its __str__ raised RuntimeError\)",
        LINE,
    ),
    "words exit": Mistake(
        loss_does(raising(ExitingError)), r"ExitingError: \(its __str__ raised SystemExit\)", LINE
    ),
    "half a letter": Mistake(
        loss_does(raising(lambda: ValueError("\ud800"))), r"ValueError: \\ud800", LINE
    ),
    "long": Mistake(loss_does(raising(lambda: ValueError("x" * 100_000))), "ValueError: xxx", LINE),
    "sys.exit": Mistake(loss_does(exit_by_hand), "SystemExit: 3", LINE),
    "interrupt": Mistake(loss_does(raising(KeyboardInterrupt)), "KeyboardInterrupt", LINE),
    "stop": Mistake(loss_does(raising(StopIteration)), "StopIteration", LINE),
    "recursion": Mistake(loss_does(recurse), "RecursionError: maximum recursion", ("in recurse",)),
    "memory": Mistake(loss_does(raising(MemoryError)), "MemoryError", LINE),
    "shutdown": Mistake(
        loss_does(raising(lambda: ShutdownError("the user's other trainer"))),
        "the user's other trainer",
        LINE,
    ),
    "backward raises": Mistake(
        backward_does(raising(lambda: ArithmeticError("no"))), "ArithmeticError: no", LINE
    ),
    "backward exits": Mistake(backward_does(exit_by_hand), "SystemExit: 3", LINE),
    "metrics raise": Mistake(
        metrics_do(raising(lambda: KeyError("top5"))), "KeyError: 'top5'", LINE
    ),
    "metric is text": refused(metrics_give({"top": "0.5"}), "metric 'top' is str"),
    "metric is None": refused(metrics_give({"top": None}), "metric 'top' is NoneType"),
    "metric is a vector": refused(
        metrics_give({"top": torch.zeros(3)}), r"metric 'top' is a tensor of shape \(3,\)"
    ),
    "metric is an array": refused(
        metrics_give({"top": np.zeros(1)}), r"metric 'top' is an array of shape \(1,\)"
    ),
    "metric is dict": refused(metrics_give({"top": {"1": 0.5}}), "metric 'top' is dict"),
    "metric is complex": refused(
        metrics_give({"top": torch.tensor(1j)}), "metric 'top' is a.*complex"
    ),
    "metric is a date": refused(
        metrics_give({"top": np.datetime64(1, "s")}), "metric 'top' is datetime64"
    ),
    "metric is too large": refused(metrics_give({"top": 10**400}), "metric 'top' is int"),
    "metrics are None": refused(metrics_give(None), "metrics are NoneType: return a dict"),
    "metric has no name": refused(metrics_give({1: 0.5}), "a metric is named 1, int"),
    "loss is float": refused(
        loss_gives(lambda right: right.item()), "the loss is float: return .* a tensor"
    ),
    "loss is complex": refused(
        loss_gives(lambda right: right * 1j), "the loss is a tensor.*complex128"
    ),
    "loss is None": refused(loss_gives(lambda right: None), "the loss is NoneType"),
    "loss is a vector": refused(
        loss_gives(lambda right: right.repeat(2)), r"the loss is a tensor of shape \(2,\)"
    ),
    "weight is NaN": refused(
        loss_gives(lambda right: (right, torch.tensor(float("nan")))), "the loss weighs nan"
    ),
    "weight is huge": refused(loss_gives(lambda right: (right, 1e99)), "the loss weighs 1e\\+99"),
    "weight is negative": refused(
        loss_gives(lambda right: (right, np.float32(-1))), "the loss weighs -1"
    ),
    "weight is None": refused(loss_gives(lambda right: (right, None)), "the loss weighs NoneType"),
    "weights": refused(
        loss_gives(lambda right: (right, torch.ones(2))), r"weighs a tensor of shape \(2,\)"
    ),
    "no result": refused(
        model_computes(lambda computed: None), "the model computed NoneType: return"
    ),
    "result of text": refused(
        model_computes(lambda c: Computed("0", c.weight, 2, {})), "the loss is str"
    ),  # type: ignore[arg-type]
    "half a sample": refused(
        model_computes(lambda c: Computed(c.loss, c.weight, 0.5, {})), "0.5 samples"
    ),  # type: ignore[arg-type]
    "weight of no metric": refused(
        model_computes(lambda c: replace(c, weights={"a": 1.0})),
        "a weight of 'a', which is no metric",
    ),
    "silent": refused(deaf, "before it had called ready for each of .*'bias'"),
    "item raises": Mistake(
        items_do(raising(lambda: IndexError("no row"))), "IndexError: no row", LINE
    ),
    "item stops": Mistake(items_do(raising(StopIteration)), "StopIteration", LINE),
    "item exits": Mistake(items_do(exit_by_hand), "SystemExit: 3", LINE),
    "items do not fit": Mistake(
        items_do(lambda: (torch.zeros(5), torch.zeros(5))), "RuntimeError: ", ("in forward",)
    ),
    "collate raises": Mistake(
        collate_does(raising(lambda: TypeError("odd"))), "TypeError: odd", LINE
    ),
    "stream raises": Mistake(stream(read_nothing), "OSError: no such shard", LINE),
    "stream is short": Mistake(stream(lambda: True), "the stream ended before sample"),
    "source ends": refused(
        lambda switch: torch_model(switch, data=Ending(switch)), "open.. must yield a batch"
    ),
}


CASES = [
    pytest.param(
        mistake,
        strategy,
        1 + (row + column) % 2,
        id=f"{mistake}-{strategy}-{1 + (row + column) % 2}",
    )
    for row, mistake in enumerate(MISTAKES)
    for column, strategy in enumerate(STRATEGIES)
]


@pytest.mark.few(40)
@pytest.mark.parametrize(("name", "strategy", "workers"), CASES)
def test_a_mistake_is_told_and_the_trainer_goes_on(name: str, strategy: str, workers: int) -> None:
    mistake, switch, culprit = MISTAKES[name], Switch(), workers - 1

    def create(worker: int, device: int) -> Any:
        return mistake.make(switch if worker == culprit else Switch())

    def job() -> InProcessCluster:
        return InProcessCluster(create, num_workers=workers, strategy=STRATEGIES[strategy])

    cluster, straight = job(), job()
    straight.step(3)
    cluster.step(1)
    before = cluster.weights()
    switch.on = True
    *_, failure = cluster.step(1)
    assert isinstance(failure, Failure)
    with pytest.raises(
        mistake.error, match=f"^worker {culprit}.*step 2.*{mistake.words}"
    ) as caught:
        raise_step_error(failure, {})
    for line in mistake.lines:
        assert line in str(caught.value.__cause__)
    if strategy in TOGETHER:
        assert same_bits(cluster.weights(), before)
    switch.on = False
    assert [type(result) for result in cluster.step(2)] == [Result] * 2
    if strategy in TOGETHER:
        assert same_bits(cluster.weights(), straight.weights())


@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_of_number_is_a_metric(workers: int) -> None:
    given = {
        "tensor": torch.tensor(0.25, requires_grad=True),
        "half": torch.tensor(0.25, dtype=torch.bfloat16),
        "eighth": torch.tensor(0.25).to(torch.float8_e5m2),
        "count": torch.tensor(3),
        "flag": torch.tensor(True),
        "float": 0.25,
        "int": 3,
        "bool": True,
        "float32": np.float32(0.25),
        "longdouble": np.longdouble(0.25),
        "int8": np.int8(3),
        "uint64": np.uint64(3),
        "bool_": np.bool_(True),
        "array": np.array(0.25),
        "nan": torch.tensor(float("nan")),
        "inf": np.float64("inf"),
    }

    def create(worker: int, device: int) -> Any:
        model = torch_model(Switch())
        model.own_metrics = lambda: given
        return model

    cluster = InProcessCluster(create, num_workers=workers)
    (result,) = cluster.step()
    found = result.metrics
    values = {name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
    expected = {name: float(value) for name, value in values.items()}  # type: ignore[arg-type]
    assert list(map(str, map(found.get, expected))) == list(map(str, expected.values()))


def test_a_loss_weighs_what_any_kind_of_number_says() -> None:
    def trained(weight: Any) -> Any:
        def create(worker: int, device: int) -> Any:
            return torch_model(Switch(), loss=lambda *pair: (nn.functional.mse_loss(*pair), weight))

        cluster = InProcessCluster(create, num_workers=2)
        cluster.step(2)
        return cluster.weights()

    plain = trained(3.0)
    for weight in (
        3,
        torch.tensor(3),
        torch.tensor(3.0, requires_grad=True),
        np.float32(3),
        np.int16(3),
    ):
        assert same_bits(trained(weight), plain)


def test_a_loss_that_is_not_finite_is_reported_as_it_is() -> None:
    def create(worker: int, device: int) -> Any:
        class Infinite(TorchModel):
            def compute_gradients(self, *arguments: Any, **more: Any) -> Computed:
                computed = super().compute_gradients(*arguments, **more)
                return Computed(float("inf"), computed.weight, computed.samples, computed.metrics)

        return torch_model(Switch(), Infinite)

    (result,) = InProcessCluster(create, num_workers=2).step()
    assert result.loss == float("inf")


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "local"])
def test_a_schedule_may_set_numpy_scalars_and_tensors(strategy: str) -> None:
    def trained(factor: Any) -> Any:
        def create(worker: int, device: int) -> Any:
            return torch_model(
                Switch(),
                lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
                    o, lambda step: factor(0.5**step)
                ),
            )

        cluster = InProcessCluster(create, num_workers=2, strategy=STRATEGIES[strategy])
        cluster.step(3)
        return cluster.weights()

    plain = trained(float)
    assert same_bits(trained(np.float64), plain)
    assert all(
        torch.allclose(value, plain[name], rtol=1e-5) for name, value in trained(np.float32).items()
    )
    assert all(
        torch.allclose(value, plain[name], rtol=1e-5)
        for name, value in trained(torch.tensor).items()
    )


@pytest.mark.parametrize(
    "wrong", [lambda: sys.exit("no rate"), lambda: "fast", lambda: float("nan"), lambda: None]
)
def test_a_learning_rate_that_is_none_is_told(wrong: Callable[[], Any]) -> None:
    def create(worker: int, device: int) -> Any:
        return torch_model(Switch(), learning_rate=lambda step: 0.1 if step < 2 else wrong())

    cluster = InProcessCluster(create, num_workers=2)
    *_, failure = cluster.step(3)
    with pytest.raises(ModelRaisedError, match="schedule raised in step 3"):
        raise_step_error(failure, {})


@pytest.mark.long
def test_a_data_loader_with_processes_tells_what_its_dataset_raised() -> None:
    def create(worker: int, device: int) -> Any:
        switch = Switch()
        switch.on = worker == 1
        data = Numbers(switch, raising(lambda: ArithmeticError("in a process of the loader")))
        return torch_model(switch, data=DataLoader(data, batch_size=2, num_workers=1))

    cluster = InProcessCluster(create, num_workers=2)
    (failure,) = cluster.step()
    with pytest.raises(
        ModelRaisedError, match=r"(?s)^worker 1.*ArithmeticError: .*in a process of"
    ) as caught:
        raise_step_error(failure, {})
    assert LINE[0] in str(caught.value.__cause__)


# -- errors as text ----------------------------------------------------------------------------------


def told_of(error: BaseException) -> dict[str, str]:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - as processes do
        return describe_error(raised)


def test_our_own_errors_keep_their_class_and_words() -> None:
    class SpecialError(ModelError):
        pass

    for error in (ModelError("it: has\ntwo lines"), SpecialError("it: has\ntwo lines")):
        found = described_error(told_of(error), "worker 1: ")
        assert type(found) is ModelError
        assert str(found) == "worker 1: it: has\ntwo lines"
        assert "told_of" in str(found.__cause__)
    assert described_error(told_of(ValueError("another's"))) is None
    assert (
        described_error({"error": "ModelError: no kind", "traceback": "", "kind": "Mapping"})
        is None
    )


def test_what_travels_is_text_of_bounded_length() -> None:
    told = told_of(UnpicklableError())
    assert pickle.loads(pickle.dumps(RemoteError(told))).told == told
    told = told_of(ValueError("x" * 1_000_000))
    assert sum(map(len, told.values())) < 30_000
    assert "raise error" in told["traceback"]
