"""The examples of ResNet-101, Ray Data, Ray Tune, a strategy of one's own and Flax do what they say."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import ray
import torch

from steepest.core.config.run import data_directory
from steepest.errors import ConfigurationError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

RAYS_OWN = "ignore::DeprecationWarning:ray.data"
needs_adult = pytest.mark.skipif(
    not (data_directory() or Path("/nowhere")).joinpath("adult").is_dir(),
    reason="needs Adult: set STEEPEST_DATA to a folder that has adult/",
)


@pytest.fixture
def example() -> Iterator[Callable[[str], ModuleType]]:
    """Imports an example; it travels to workers as a script does, which cannot import it either."""
    found: dict[str, ModuleType] = {}

    def load(name: str) -> ModuleType:
        found[name] = importlib.import_module(name)
        ray.cloudpickle.register_pickle_by_value(found[name])
        return found[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield load
        for name, module in found.items():
            ray.cloudpickle.unregister_pickle_by_value(module)
            del sys.modules[name]


# -- ResNet-101 ----------------------------------------------------------------------------------------


def test_the_network_is_resnet_101(example: Callable[[str], ModuleType]) -> None:
    with torch.device("meta"):
        net = example("resnet101").resnet()
    assert sum(parameter.numel() for parameter in net.parameters()) == 44_549_160  # torchvision's
    convolutions = [each for each in net.modules() if isinstance(each, torch.nn.Conv2d)]
    assert len(convolutions) == 1 + 3 * (3 + 4 + 23 + 3) + 4  # 100 layers, and four shortcuts


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_rate_is_printed_for_each_step(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--small --num-iters 3 --batch-size 2 --devices-per-worker 2 --strategy allreduce"
    rate = example("resnet101").main(arguments.split())
    *steps, mean = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"step (\d): ([\d.]+) images/s, loss ([\d.]+)", step) for step in steps]
    assert [match and match[1] for match in found] == ["1", "2", "3"]
    assert mean == f"mean: {rate:.1f} images/s"
    slowest, *_, fastest = sorted(float(match[2]) for match in found if match)
    assert slowest * 0.9 <= rate <= fastest * 1.1


# -- a strategy of one's own ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_votes_train_as_well_as_gradients(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    own, known = example("own_strategy").main([])
    assert known > 0.9
    assert own > known - 0.03
    after = re.findall(r"test accuracy ([\d.]+)%$", capsys.readouterr().out, re.MULTILINE)
    assert [float(each) for each in after] == pytest.approx([100 * own, 100 * known], abs=0.051)


# -- Ray Data ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings(RAYS_OWN)
def test_a_ray_dataset_is_trained_on(
    example: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pandas", reason="pip install 'ray[data]'")
    monkeypatch.delenv("STEEPEST_DATA", raising=False)
    area = example("ray_data").main([])
    printed = capsys.readouterr().out
    assert "2,000 rows in 5 epochs of 400\n" in printed
    assert area > 0.98
    assert re.search(rf"^169 test rows: accuracy 9\d\.\d%, area .* {area:.3f}$", printed, re.M)


@pytest.mark.full
@needs_adult
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings(RAYS_OWN)
def test_adult_is_prepared_and_learned(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas", reason="pip install 'ray[data]'")
    area = example("ray_data").main(["--epochs", "2"])
    assert area > 0.9
    assert "65,122 rows in 2 epochs of 32,561\n" in capsys.readouterr().out


# -- Ray Tune ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_tune_finds_the_better_rate(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("ray.tune", reason="pip install 'steepest[tune]'")
    arguments = ["--strategies", "allreduce", "--rates", "0.3", "0.001", "--results", str(tmp_path)]
    held = ray.util.placement_group(
        [{"CPU": 5}]
    )  # of eight: one trial at a time has room, in order
    try:
        results = example("ray_tune").main(arguments)
    finally:
        ray.util.remove_placement_group(held)
    assert results.get_best_result().config["lr"] == 0.3
    printed = capsys.readouterr().out
    assert "best: strategy='allreduce', lr=0.3" in printed
    assert re.search(r"learning rate 0\.3 *: accuracy [\d.]+% after 16 epochs", printed)
    assert re.search(r"learning rate 0\.001 *: accuracy [\d.]+% after 2 epochs", printed)


# -- JAX -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("jax") is not None, reason="JAX is installed")
def test_the_example_of_flax_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(ConfigurationError, match=r"pip install 'steepest\[jax\]'"):
        runpy.run_path(str(EXAMPLES / "mnist_flax.py"))
