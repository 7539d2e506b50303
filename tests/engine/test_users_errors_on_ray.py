"""Mistakes of users' code in processes on Ray: no process dies of them, and everything goes on."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import nn

from steepest import Callback, DistributedSGD, StepResult, TorchModel
from steepest.collectives import barrier
from steepest.errors import ConfigurationError, ModelError, ModelRaisedError, SteepestError
from tests.reference import samples, sgd

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Complaint(Exception):  # noqa: N818
    """An exception that no process can pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Faulty(TorchModel):
    """Does something in its loss, and gives any metrics."""

    do: Callable[[], Any] = staticmethod(lambda: None)
    given: Any = {"tensor": torch.tensor(0.5), "numpy": np.float32(0.25), "nan": float("nan")}

    def loss(self, batch: Any) -> Any:
        self.do()
        return super().loss(batch)

    def metrics(self, batch: Any) -> Any:
        return self.given


def create(worker: int, device: int) -> Faulty:
    return Faulty(
        nn.Linear(3, 2).double(),
        loss=nn.functional.mse_loss,
        data=samples(16),
        batch_size=2,
        optimizer=sgd(),
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, marks=pytest.mark.full, id="one worker"),
        pytest.param(2, id="two workers"),
    ],
)
def trainer(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[DistributedSGD]:
    with DistributedSGD(create, num_workers=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def _nobody_dies(request: pytest.FixtureRequest) -> Iterator[None]:
    if "trainer" not in request.fixturenames:
        yield
        return
    made: DistributedSGD = request.getfixturevalue("trainer")
    before, at = made.foreach_worker(lambda view: view.pid), made.stats().step
    yield
    assert made.foreach_worker(lambda view: view.pid) == before
    result = made.step()
    assert result.step > at
    assert str(result.metrics) == str({"nan": float("nan"), "numpy": 0.25, "tensor": 0.5})


def exits() -> None:
    sys.exit("the user's own exit")


def interrupts() -> None:
    raise KeyboardInterrupt


def stops() -> None:
    raise StopIteration


def complains() -> None:
    raise Complaint


@pytest.mark.parametrize("does", [exits, interrupts, stops, complains])
def test_whatever_user_code_raises_in_a_worker(
    trainer: DistributedSGD, does: Callable[[], None]
) -> None:
    last = trainer.num_workers - 1

    def switch(view: Any) -> None:
        for model in view.models if view.index == last else ():
            model.do = does

    def fails(view: Any) -> None:
        if view.index == last:
            does()

    told = {
        exits: "SystemExit: the user's own exit",
        interrupts: "KeyboardInterrupt",
        stops: "StopIteration",
    }
    words = told.get(does, r"Complaint: \(its __str__ raised RuntimeError\)")
    with pytest.raises(
        ModelRaisedError, match=rf"^worker {last} on .*run the function 'fails': {words}"
    ) as caught:
        trainer.foreach_worker(fails)
    assert f"in {does.__name__}" in str(caught.value.__cause__)
    trainer.foreach_worker(switch)
    at = trainer.stats().step
    with pytest.raises(
        ModelRaisedError, match=rf"^worker {last} on .*in step {at + 1}: {words}"
    ) as caught:
        trainer.fit(steps=2, progress=False)
    assert f"in {does.__name__}" in str(caught.value.__cause__)
    with pytest.raises(ModelRaisedError, match=rf"^worker {last} on .*could not evaluate: {words}"):
        trainer.evaluate(samples(4))
    trainer.foreach_model(lambda model: model.__dict__.pop("do", None))


def test_metrics_that_are_no_numbers(trainer: DistributedSGD) -> None:
    last, at = trainer.num_workers - 1, trainer.stats().step

    def switch(view: Any) -> None:
        for model in view.models if view.index == last else ():
            model.given = {"top": "0.5"}

    trainer.foreach_worker(switch)
    with pytest.raises(
        ModelError, match=rf"^worker {last} on .*, step {at + 1}: metric 'top' is str"
    ):
        trainer.step()
    with pytest.raises(ModelError, match=rf"^worker {last} on .*: metric 'top' is str"):
        trainer.evaluate(samples(4))
    trainer.foreach_model(lambda model: model.__dict__.pop("given", None))


class Unreadable:
    """Can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Exiting:
    """Ends who reads it, or who sends it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return (sys.exit, (self.where,)) if self.where == "reading" else sys.exit(self.where)


def exits_as_it_is_sent(view: Any) -> Any:
    return {"inside": Exiting("sending")}


def exits_as_it_is_read(view: Any) -> Any:
    return Exiting("reading")


def generates(view: Any) -> Any:
    return (number for number in range(3))


def locks(view: Any) -> Any:
    return {"inside": [threading.Lock()]}


def unreadable(view: Any) -> Any:
    return Unreadable()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            generates,
            r"worker \d on .*run the function 'generates'.*cannot pickle 'generator' object; return",
        ),
        (
            locks,
            r"worker \d on .*run the function 'locks'.*cannot pickle '_thread.lock' object; return",
        ),
        (
            exits_as_it_is_sent,
            r"worker \d on .*run the function 'exits_as_it_is_sent'.*SystemExit: sending; return",
        ),
        (
            exits_as_it_is_read,
            r"cannot read what worker \d on .* returned .*run the function 'exits_as_it_is_read'",
        ),
        (
            unreadable,
            r"cannot read what worker \d on .* returned when asked to run the function 'unreadable'.*invalid",
        ),
    ],
)
def test_what_a_function_returns_and_cannot_travel(
    trainer: DistributedSGD, function: Callable[[Any], Any], words: str
) -> None:
    for each in (trainer.foreach_worker, trainer.foreach_model, trainer.for_model):
        with pytest.raises(ConfigurationError, match=words):
            each(function)


@pytest.mark.parametrize(
    "make", [lambda: ray.put(3), lambda: None, list, lambda: np.arange(100_000)]
)
def test_what_a_function_returns_is_what_it_returned(
    trainer: DistributedSGD, make: Callable[[], Any]
) -> None:
    result = make()
    assert str(trainer.for_model(lambda model: result)) == str(result)
    assert str(trainer.foreach_model(lambda model: result)) == str([result] * trainer.num_workers)
    assert str(trainer.foreach_worker(lambda view: result)) == str([result] * trainer.num_workers)


def test_what_is_given_and_cannot_travel(trainer: DistributedSGD) -> None:
    lock, thing = threading.Lock(), Unreadable()

    def holds(view: Any) -> None:
        assert lock

    def reads(view: Any) -> None:
        assert thing

    for each in (trainer.foreach_worker, trainer.foreach_model, trainer.for_model):
        with pytest.raises(
            ConfigurationError,
            match=r"holds'.*cannot be sent to the workers: .*variable 'lock' of the function 'holds'",
        ):
            each(holds)
        with pytest.raises(
            ConfigurationError,
            match=r"^worker \d on .* cannot read what it was sent to run .*'reads'",
        ):
            each(reads)
    with pytest.raises(
        ConfigurationError, match=r"evaluate cannot be sent to the workers: .*generator"
    ):
        trainer.evaluate(number for number in range(3))


def test_a_module_that_only_the_driver_can_import(
    trainer: DistributedSGD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log_of(view: Any) -> str:
        return os.readlink("/proc/self/fd/2")

    (tmp_path / "drivers_alone.py").write_text("def function(view):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    function = importlib.import_module("drivers_alone").function
    with pytest.raises(ConfigurationError) as caught:
        trainer.foreach_worker(function)
    del sys.modules["drivers_alone"]  # the other trainer's test has one of its own
    assert str(caught.value) == (
        f"workers cannot import 'drivers_alone', which the driver finds in {tmp_path}: put that "
        f'folder on PYTHONPATH before Ray starts, or give ray.init(runtime_env={{"working_dir": '
        f'"{tmp_path}"}})'
    )
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    for log in trainer.foreach_worker(log_of):
        assert "drivers_alone" not in Path(log).read_text()


def test_ray_prints_no_traceback_of_what_the_other_workers_raise(
    trainer: DistributedSGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Any] = []
    monkeypatch.setattr("ray._private.worker._unhandled_error_handler", printed.append)

    def function(view: Any) -> None:
        if view.index == 0:
            raise ValueError("no file")
        barrier()  # raises when the driver has told of worker 0

    with pytest.raises(ModelRaisedError, match="ValueError: no file"):
        trainer.foreach_worker(function)
    assert trainer.foreach_worker(lambda view: 1) == [1] * trainer.num_workers
    gc.collect()
    assert printed == []


class Broken(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set that cannot be read, or tells no length."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length or exits()  # type: ignore[func-returns-value, return-value]

    def __getitem__(self, index: int) -> Any:
        raise OSError("no such file")


def test_data_that_cannot_be_read(trainer: DistributedSGD) -> None:
    with pytest.raises(
        ModelRaisedError, match=r"^worker \d on .* could not evaluate: OSError: no such file"
    ):
        trainer.evaluate(Broken(4))
    with pytest.raises(ModelRaisedError, match=r"^worker \d on .* could not evaluate: SystemExit"):
        trainer.evaluate(Broken(None))


class Raises(Callback):
    """A callback that raises in a step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [ArithmeticError("no"), StopIteration("no"), SystemExit("no"), Complaint()]
)
def test_a_callback_that_raises(trainer: DistributedSGD, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        trainer.fit(steps=20, callbacks=[Raises(error)], progress=False)
    assert caught.value is error


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("where", "raised", "words"),
    [
        (
            "creator",
            ModelRaisedError,
            r"worker 1 could not build the model: SystemExit: the user's own exit",
        ),
        ("optimizer", ModelRaisedError, r"worker 1 could not build the model: Complaint: "),
        ("data", ModelRaisedError, r"worker 1 could not build the model: SystemExit"),
        ("size", ModelError, r"^worker 1: .*size.*2.5"),
    ],
)
def test_a_model_that_one_worker_cannot_build(
    where: str, raised: type[SteepestError], words: str
) -> None:
    def build(worker: int, device: int) -> Any:
        model = create(worker, device)
        if worker == 1 and where == "creator":
            exits()
        if worker == 1 and where == "optimizer":
            TorchModel(
                nn.Linear(3, 2), loss=nn.functional.mse_loss, data=samples(4), batch_size=2,
                optimizer=lambda module: complains(),
            )  # type: ignore[arg-type, func-returns-value]  # fmt: skip
        if worker == 1 and where == "data":
            len(Broken(None))
        if worker == 1 and where == "size":
            model.data.size = 2.5
        return model

    with pytest.raises(raised, match=words):
        DistributedSGD(build, num_workers=2)


@pytest.mark.long
def test_no_socket_stays_of_workers_whose_functions_have_returned() -> None:
    counts = []
    for _ in range(4):
        with DistributedSGD(create, num_workers=2) as made:
            assert made.foreach_model(lambda model: np.arange(3.0))[1].tolist() == [0.0, 1.0, 2.0]
        counts.append(sockets())
    assert counts[3] <= counts[1]  # Ray itself keeps some


def sockets() -> int:
    """How many sockets this process has open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.append(os.readlink(each))
    return sum(each.startswith("socket:") for each in found)
