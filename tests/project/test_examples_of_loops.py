"""The examples with loops of their own: alone and on workers they learn the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from steepest.core.config.run import data_directory
from tests.example_modules import imported
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(params=["own_loop_digits", "own_loop_gan", "reinforce"])
def example(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An example as a module; it travels to workers as a script does, which cannot import it either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        module = importlib.import_module(request.param)
        cloudpickle.register_pickle_by_value(module)
        yield module
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[request.param]


@pytest.mark.long
@pytest.mark.few(1)
def test_alone_it_learns(example: Any) -> None:
    assert example.main([]) > 0.9


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.usefixtures("machine")
def test_on_two_workers_it_learns(example: Any) -> None:
    assert example.main(["--workers", "2"]) > 0.9


@pytest.mark.long
@pytest.mark.skipif(
    data_directory() is None, reason="without STEEPEST_DATA another text is learned"
)
def test_a_text_is_learned_on_where_the_command_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same number of steps in one go, and in two: the same losses, and the best is kept."""

    def on_workers(steps: int, folder: str) -> float:
        with quiet(), Simulation(seed=1).running():
            found = example.main(
                ["--steps", str(steps), "--workers", "2", "--checkpoints", str(tmp_path / folder)]
            )
        return float(found)

    with imported("own_loop_text") as found:
        example = found["own_loop_text"]
        whole = on_workers(6, "whole")
        first = on_workers(3, "parts")
        capsys.readouterr()
        assert on_workers(6, "parts") == pytest.approx(whole, rel=1e-6)
        assert whole < first
        assert capsys.readouterr().out.startswith(f"step 6: validation loss {whole:.3f}")
        assert example.main(["--steps", "40"]) < 3.2
