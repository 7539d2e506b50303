"""Errors of user code as they are told: the workers that met them, and the user's own frames alone."""

from __future__ import annotations

import functools
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from steepest import DistributedSGD, TorchModel
from steepest.errors import ConfigurationError, ModelError, ModelRaisedError, describe_error
from steepest.runtime.calls import RemoteError, unimportable, who_raised, why_unpicklable
from steepest.runtime.job_runtime import Call, CallRaisedError, JobRuntime, using
from steepest.runtime.process import ProgramDefaults
from steepest.testing import InProcessCluster
from tests.reference import same_bits, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def breaks(worker: int = 0) -> None:
    raise ValueError(f"no file of worker {worker}" if worker else "no file")


def model(**changes: Any) -> TorchModel:
    given = {"loss": torch.nn.functional.mse_loss, "data": samples(8), "batch_size": 2}
    return TorchModel(torch.nn.Linear(3, 2).double(), **{**given, "optimizer": sgd(), **changes})


def frames(error: BaseException | str) -> list[str]:
    """The files and functions of the frames in a printed traceback, without those of the simulation."""
    found = re.findall(r'File "(.*?)", line \d+, in (\S+)', str(error))
    stand_in = Path(__file__).parents[1] / "simulation"
    if (
        found and Path(found[0][0]).parent == stand_in
    ):  # a future of the simulation, which has a real one
        standard = ("_base.py", "threading.py")
        found = [each for each in found if Path(each[0]).name not in standard]
    found = [each for each in found if Path(each[0]).parent != stand_in]
    return [f"{Path(file).stem}.{function}" for file, function in found]


def raised_by(program: Callable[[], Any], kind: type[Exception]) -> Any:
    with Simulation(1).running(), pytest.raises(kind) as caught:
        program()
    printed = "".join(traceback.format_exception(caught.value))
    assert "RayTaskError" not in printed
    assert "RemoteError" not in printed
    return caught.value


@pytest.mark.parametrize("bad", [{1}, {0, 2}, set(range(6))])
def test_models_that_cannot_be_built(bad: set[int]) -> None:
    def create(worker: int, device: int) -> TorchModel:
        if worker in bad:
            breaks()
        return model()

    error = raised_by(lambda: DistributedSGD(create, 6, run_config=run_config()), ModelRaisedError)
    names, words = str(error).split(" could not build the model: ")
    assert words == "ValueError: no file"
    found = {int(name.removeprefix("worker ")) for name in names.split(", ")}
    assert found  # those that had come so far when the first one failed
    assert found <= bad
    assert frames(error.__cause__) == ["test_told_errors.create", "test_told_errors.breaks"]


def raised(words: str) -> CallRaisedError:
    return CallRaisedError("", RemoteError({"error": words, "traceback": ""}))


class Raised(Call):
    """A call that has raised."""

    def __init__(self, words: str) -> None:
        self.words = words

    def done(self) -> bool:
        return True

    def get(self, timeout: float | None = None) -> Any:
        raise raised(self.words)

    def future(self) -> Any: ...


def test_only_some_of_many_workers_are_named() -> None:
    here = cast("JobRuntime", SimpleNamespace(wait=lambda calls, seconds: [*calls]))
    calls = {Raised("KeyError: 1" if i == 1 else "no file"): f"worker {i}" for i in range(8)}
    for words, names in (
        ("no file", "worker 0, worker 2, worker 3, worker 4, 3 more"),
        ("KeyError: 1", "worker 1"),
        ("another", "a process"),
    ):
        with using(here):
            assert who_raised(raised(words), calls) == names


@pytest.mark.parametrize("alike", [False, True])
def test_functions_that_cannot_be_run(*, alike: bool) -> None:
    def function(view: Any) -> None:
        breaks(0 if alike else view.index + 1)

    def program() -> None:
        with DistributedSGD(lambda w, d: model(), 2, run_config=run_config()) as trainer:
            trainer.foreach_worker(function)

    error = raised_by(program, ModelRaisedError)
    who = r"worker 0 on \S+, worker 1 on \S+" if alike else r"worker (\d) on \S+"
    what = r"no file" if alike else r"no file of worker \d"
    assert re.fullmatch(
        rf"{who} could not run the function 'function': ValueError: {what}", str(error)
    )
    assert frames(error.__cause__) == ["test_told_errors.function", "test_told_errors.breaks"]


class EmptyShardError(Exception):
    """A user's."""


@pytest.mark.parametrize("strategy", ["ps", "async", "allreduce"])
@pytest.mark.parametrize("bad", [{0, 1, 2}, {0, 2}, {1}])
def test_all_workers_that_raise_the_same_in_a_step_are_named(bad: set[int], strategy: str) -> None:
    """Those that raise it a little later too."""

    def create(worker: int, device: int) -> TorchModel:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            pause(0.01 * worker)
            if worker in bad:
                raise EmptyShardError("no file")
            return output.sum()

        return model(loss=loss)

    def program() -> None:
        with DistributedSGD(create, 3, strategy=strategy, run_config=run_config()) as trainer:
            trainer.fit(steps=6, progress=False)

    error = raised_by(program, EmptyShardError)
    who = ", ".join(rf"worker {worker} on \S+" for worker in sorted(bad))
    assert re.match(rf"{who} raised in step \d: EmptyShardError: no file;", str(error)), str(error)


def test_another_error_of_the_same_step_is_not_taken_for_the_same() -> None:
    def loss_of(worker: int) -> Any:
        return lambda output, target: breaks(worker)

    def program() -> None:
        with DistributedSGD(
            lambda worker, device: model(loss=loss_of(worker)), 2, run_config=run_config()
        ) as trainer:
            trainer.step()

    error = raised_by(program, ModelRaisedError)
    assert re.match(r"worker (\d) on \S+ raised in step 1: ValueError: no file", str(error))


def test_what_a_schedule_raises_is_caught_as_the_users_class() -> None:
    def rate(step: int) -> float:
        if step > 1:
            raise EmptyShardError("no rate")
        return 0.1

    def create(worker: int, device: int) -> TorchModel:
        return model(learning_rate=rate)

    def program() -> None:
        with DistributedSGD(create, 2, run_config=run_config()) as trainer:
            trainer.fit(steps=3, progress=False)

    error = raised_by(program, EmptyShardError)
    assert isinstance(error, ModelRaisedError)
    assert "the learning-rate schedule raised in step 3" in str(error)


def test_a_step_tells_the_frames_of_the_model_alone() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        breaks()
        return output.sum()

    cluster = InProcessCluster(lambda worker, device: model(loss=loss), num_workers=2)
    (failure,) = cluster.step()
    assert frames(failure.traceback) == ["test_told_errors.loss", "test_told_errors.breaks"]


def told_of(function: Callable[[], Any]) -> dict[str, str]:
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(function).exception()
    assert error is not None
    return describe_error(error)


@pytest.mark.parametrize(("path", "is_told"), [("data/train.pt", True), ("/data/train.pt", False)])
def test_of_a_relative_path_that_is_not_there_the_directory_is_told(
    path: str, *, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = told_of(lambda: torch.load(path))["error"]
    assert found.startswith("FileNotFoundError")
    assert path in found
    assert (f"seen from {tmp_path}, the directory of this process" in found) == is_told


def test_what_led_to_user_code_is_left_out_and_causes_are_kept() -> None:
    def chained() -> None:
        try:
            torch.nn.Linear(3, 2)(torch.zeros(4))
        except RuntimeError as error:
            raise ArithmeticError("no shape") from error

    found = frames(told_of(chained)["traceback"])
    assert found[0] == "test_told_errors.chained"
    assert "linear.forward" in found  # what user code calls is shown, if it is not steepest's
    assert not any("thread" in frame or "_base" in frame for frame in found)
    assert "direct cause" in told_of(chained)["traceback"]


def of_steepest(source: str) -> Callable[[], Any]:
    """A function that is defined in one of steepest's modules."""
    space: dict[str, Any] = {"__name__": "steepest.core.engine.somewhere", "ModelError": ModelError}
    exec(source, space)
    made: Callable[[], Any] = space["function"]
    return made


def test_steepests_own_words_are_enough_where_no_user_code_took_part() -> None:
    on_purpose = of_steepest("def function(): raise ModelError('it is none')")
    assert told_of(on_purpose)["traceback"] == ""
    assert frames(told_of(lambda: on_purpose())["traceback"]) == ["test_told_errors.<lambda>"]


def test_steepests_own_mistakes_are_told_with_all_frames() -> None:
    mistaken = of_steepest("def function(): assert 1 == 2")
    assert frames(told_of(mistaken)["traceback"])[0] == "thread.run"
    assert frames(told_of(lambda: mistaken())["traceback"])[0] == "thread.run"


def test_a_module_that_only_the_driver_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone.py").write_text("")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("alone", "packed", "packed.inner"):
        assert unimportable(f"ModuleNotFoundError: No module named '{name}'") == (
            f"workers cannot import '{name}', which the driver finds in {tmp_path}: put that "
            'folder on PYTHONPATH before Ray starts, or give ray.init(runtime_env={"working_dir": '
            f'"{tmp_path}"}})'
        )
    assert unimportable("ModuleNotFoundError: No module named 'nobody_has_it'") == ""
    assert unimportable("ValueError: No module named 'alone'") == ""
    assert unimportable("ModuleNotFoundError: No module named 'sys'") == ""


def test_an_import_in_a_creator_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def create(worker: int, device: int) -> Any:
        raise ModuleNotFoundError("No module named 'alone'")  # as a worker would

    error = raised_by(lambda: DistributedSGD(create, 2, run_config=run_config()), ModelRaisedError)
    assert re.search(r"No module named 'alone'; workers cannot import 'alone', which", str(error))
    assert not isinstance(error, ConfigurationError)


class Locked:
    """Holds what cannot be pickled, beside what its pickle leaves out."""

    def __init__(self) -> None:
        self.left_out = self.kept = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}


def test_the_variable_that_cannot_be_pickled_is_named() -> None:
    data, empty = {"train": [1, Locked()]}, None

    def inner() -> Any:
        return data, empty

    def takes(lock: Any = Locked()) -> Any:  # noqa: B008 - a default is pickled too
        return lock

    def why(value: Any) -> str:
        with pytest.raises(TypeError) as caught:
            cloudpickle.dumps(value)
        return why_unpicklable(value, caught.value)

    expected = (
        "the variable 'data' of the function 'inner', of type dict, cannot be pickled "
        "(data['train'][1].kept is of type lock: cannot pickle '_thread.lock' object); make it inside"
    )
    assert expected in why(inner)
    assert expected in why(lambda worker, device: inner())
    assert expected in why(functools.partial(print, inner))
    assert "the variable 'lock' of the function 'takes', of type Locked" in why(takes)
    assert why(Locked()).startswith("kept is of type lock: ")
    assert why(Locked().__getstate__).startswith("self.kept is of type lock: ")
    assert why(number for number in range(3)).startswith("cannot pickle 'generator' object; make")


def test_what_a_trainer_cannot_take_is_told_and_changes_nothing() -> None:
    def wrong(match: str, function: Callable[..., Any], *arguments: Any) -> None:
        with pytest.raises(ConfigurationError, match=match):
            function(*arguments)

    def put(name: str, value: Any, models: Any) -> None:
        for each in getattr(models, "models", [models]):
            setattr(each, name, value)

    with (
        Simulation(1).running(),
        DistributedSGD(lambda worker, device: model(), 2, run_config=run_config()) as sgd,
    ):
        sgd.step()
        before, (x, y) = sgd.weights(), samples(6)
        loader = DataLoader(TensorDataset(x, y), batch_size=3)
        wrong(r"a Tensor as batch_size: give .* evaluate\(\(x, y\)\)", sgd.evaluate, x, y)
        wrong("batch_size='4'", sgd.evaluate, (x, y), "4")
        wrong("a list of 6 arrays of 1 dimensions", sgd.evaluate, list(x))
        wrong("a _NoLength of unknown length: give arrays", sgd.evaluate, _NoLength())
        wrong("batch_size=2 beside a DataLoader with", sgd.evaluate, loader, 2)
        assert sgd.evaluate(loader).samples == 6
        for setting in (sgd.set_weights, sgd.load_state_dict):
            wrong("is a list: give tensors by name", setting, [x])
            wrong("has the name 3: give strings", setting, {3: x})
            wrong(r"\['bias'\] is a str that is no tensor", setting, {"bias": "x"})
        for name, value in (("batch_size", 8), ("data", loader)):
            for each in (sgd.foreach_model, sgd.for_model, sgd.foreach_worker):
                said = f"the function 'partial' has set a model's {name} to"
                wrong(said, each, functools.partial(put, name, value))
        assert sgd.foreach_model(lambda model: (model.batch_size, model.data.size)) == [(2, 8)] * 2
        assert same_bits(sgd.weights(), before)
        assert sgd.step().samples == 4


def test_a_process_has_the_arguments_and_the_default_dtype_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["default_worker.py", "--node-ip-address=1.2.3.4"])
    before = ProgramDefaults.of_this_process()
    try:
        ProgramDefaults(("train.py", "0.1"), torch.float64).enter()
        assert [float(each) for each in sys.argv[1:]] == [0.1]
        assert torch.zeros(1).dtype == torch.float64
    finally:
        before.enter()


class _NoLength:
    def __iter__(self) -> Iterator[Any]:
        return iter([samples(2)])


class _Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise ValueError("sample 37 is broken")


def test_the_message_of_a_loaders_process_has_no_traceback() -> None:
    with pytest.raises(ValueError, match="Original Traceback") as raised:
        list(DataLoader(_Broken(), num_workers=1))
    told = describe_error(raised.value)
    assert told["error"] == (
        "ValueError: Caught ValueError in DataLoader worker process 0: ValueError: sample 37 is broken"
    )
    assert "in __getitem__" in told["traceback"]
