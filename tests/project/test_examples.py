"""The examples do what they say: digits are learned, no update is lost, and both print what they promise."""

from __future__ import annotations

import gzip
import importlib
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ray

from steepest.core.config.run import data_directory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("data", "mnist_parameter_server", "sharded_parameter_server")

needs_mnist = pytest.mark.skipif(
    not (data_directory() or Path("/nowhere")).joinpath("mnist").is_dir(),
    reason="needs MNIST: set STEEPEST_DATA to a folder that has mnist/",
)


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, Any]]:
    """The examples as modules; they travel to workers as scripts do, which cannot import them either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        found = {name: importlib.import_module(name) for name in NAMES}
        for module in found.values():
            for by in (cloudpickle, ray.cloudpickle):
                by.register_pickle_by_value(module)
        yield found
        for name, module in found.items():
            for by in (cloudpickle, ray.cloudpickle):
                by.unregister_pickle_by_value(module)
            del sys.modules[name]


# -- what they need ------------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has a package be missing; examples find each other meanwhile."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = {*sys.modules}

    def remove(package: str) -> None:
        for module in [each for each in sys.modules if each.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)

    yield remove
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("own_loop_digits", "sklearn", "demo"),
        ("own_loop_gan", "sklearn", "demo"),
        ("own_model", "sklearn", "demo"),
        ("own_strategy", "sklearn", "demo"),
        pytest.param("ray_data", "sklearn", "demo", marks=pytest.mark.long),
        pytest.param("ray_tune", "sklearn", "demo", marks=pytest.mark.long),
        pytest.param("ray_tune_population", "sklearn", "demo", marks=pytest.mark.long),
        ("wide_and_deep", "sklearn", "demo"),
        ("mnist_keras", "keras", "tensorflow"),
    ],
)
def test_a_missing_extra_is_named(
    without: Callable[[str], None], name: str, missing: str, extra: str
) -> None:
    without(missing)
    path = EXAMPLES / f"{name}.py"
    with pytest.raises(SystemExit, match=re.escape(f"pip install 'steepest[{extra}]'")):
        runpy.run_path(str(path), run_name="__main__")
    assert re.search(rf"pip install '.*steepest\[(\w+,)*{extra}(,\w+)*\]", path.read_text())


@pytest.mark.parametrize(
    ("name", "load"),
    [("data", "load_mnist"), ("adult", "load"), ("a9a_logistic_regression", "load")],
)
def test_a_substitute_for_missing_data_names_its_extra(
    without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, name: str, load: str
) -> None:
    monkeypatch.delenv("STEEPEST_DATA", raising=False)
    without("sklearn")
    found = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    with pytest.raises(SystemExit, match=re.escape("pip install 'steepest[demo]'")):
        found[load]()


# -- a network on MNIST --------------------------------------------------------------------------------


def check_report(printed: str, source: str, iterations: int, last: float) -> int:
    """What the MNIST example prints; returns the greatest staleness."""
    lines = printed.splitlines()
    assert lines[0].startswith(source)
    seen = re.findall(r"^iteration +(\d+): test accuracy ([\d.]+)%$", printed, flags=re.MULTILINE)
    assert [int(iteration) for iteration, _ in seen] == [*range(10, iterations, 10), iterations]
    assert float(seen[-1][1]) == pytest.approx(100 * last, abs=0.051)
    stale = re.search(
        r"^staleness, in updates: p50 (\d+), p95 (\d+), max (\d+)$", printed, flags=re.MULTILINE
    )
    assert stale is not None
    p50, p95, greatest = map(int, stale.groups())
    assert p50 <= p95 <= greatest
    assert re.fullmatch(r"\d+ updates, [\d,]+ samples/s while training", lines[-1])
    return greatest


@pytest.mark.few(1)
@needs_mnist
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("mode", "updates", "stalest"), [("sync", 100, 0), ("async", 200, 199)])
@pytest.mark.long
def test_mnist_is_learned(
    examples: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    mode: str,
    updates: int,
    stalest: int,
) -> None:
    accuracy = examples["mnist_parameter_server"].main(["--mode", mode, "--iterations", "100"])
    assert accuracy > 0.65  # sync 75%, async 83%
    printed = capsys.readouterr().out
    assert check_report(printed, "MNIST in ", 100, accuracy) <= stalest
    assert f"\n{updates} updates, " in printed


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_small_digits_stand_in_for_mnist(
    examples: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "sklearn", reason="the digits are scikit-learn's: pip install 'steepest[demo]'"
    )
    monkeypatch.delenv("STEEPEST_DATA", raising=False)
    accuracy = examples["mnist_parameter_server"].main(["--mode", "ssp", "--iterations", "95"])
    assert accuracy > 0.75  # it reaches 89%
    greatest = check_report(capsys.readouterr().out, "scikit-learn's digits", 95, accuracy)
    assert greatest <= 2 * 3 + 1  # two workers, at most three steps apart


# -- its data ------------------------------------------------------------------------------------------


def test_small_digits_have_mnists_form(
    examples: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "sklearn", reason="the digits are scikit-learn's: pip install 'steepest[demo]'"
    )
    monkeypatch.delenv("STEEPEST_DATA", raising=False)
    digits = examples["data"].load_mnist()
    for (x, y), count in ((digits.train, 1437), (digits.test, 360)):
        assert (x.shape, x.dtype) == ((count, 1, 28, 28), np.float32)
        assert (y.shape, y.dtype) == ((count,), np.int64)
        assert set(y) == set(range(10))


@pytest.mark.long
@needs_mnist
def test_mnist_is_downloaded_once_and_checked(
    examples: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, origin = examples["data"], data_directory()
    assert origin is not None
    monkeypatch.delenv("STEEPEST_DATA")
    monkeypatch.setattr(data, "URL", f"{(origin / 'mnist').resolve().as_uri()}/")
    folder = tmp_path / "cache"
    data.load_mnist(folder)
    monkeypatch.setattr(data, "URL", tmp_path.as_uri() + "/nothing/")
    digits = data.load_mnist(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.gz" for name in data.MD5
    )
    assert (digits.train[0].shape, digits.test[1].shape) == ((60000, 1, 28, 28), (10000,))
    assert (digits.train[0].dtype, digits.test[1].dtype) == (np.float32, np.int64)
    assert abs(digits.train[0].mean()) < 1e-3
    assert abs(digits.train[0].std() - 1) < 1e-3
    assert digits.train[1][:5].tolist() == [5, 0, 4, 1, 9]  # as everywhere

    damaged = folder / f"{data.TEST[1]}.gz"
    damaged.write_bytes(gzip.compress(gzip.decompress(damaged.read_bytes())[:-1]))
    with pytest.raises(ValueError, match="is damaged"):
        data.read(folder, data.TEST)


# -- 100 MB on servers ----------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("form", [[], ["--plain"]], ids=["push_pull", "plain"])
def test_every_update_of_every_task_is_added_once(
    examples: dict[str, Any], capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    final = examples["sharded_parameter_server"].main(
        ["--megabytes", "8", "--workers", "4", "--rounds", "5", *form]
    )
    assert final == 20.0
    printed = capsys.readouterr().out
    shown = [
        [float(number) for number in numbers.split()]
        for numbers in re.findall(
            r"^ *[\d.]+ s  first parameters: \[(.*)\]$", printed, flags=re.MULTILINE
        )
    ]
    assert all(
        len(set(numbers)) == 1 and len(numbers) == 4 for numbers in shown
    )  # never half an update
    assert shown == sorted(shown)
    assert shown[-1] == [20.0] * 4
    assert "every parameter is 20, as it should be" in printed
    assert re.search(
        r"^20 updates of 8 MB in [\d.]+ s with the start of the tasks; the longest",
        printed,
        re.MULTILINE,
    )
