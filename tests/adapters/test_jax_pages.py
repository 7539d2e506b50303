"""The code of the page for users of JAX runs as it stands, and so does the example."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="needs JAX: make test-jax")


from steepest.core.config.run import data_directory
from tests.example_modules import imported
from tests.pairs import mostly_full
from tests.simulation.run import Simulation

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_for_users_of_jax_says_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    # workers are threads of this process, whose memory is left as it is
    monkeypatch.setattr("steepest.runtime.process.keep_freed_memory", lambda: False)
    text = (ROOT / "docs" / "howto" / "from_jax.md").read_text()
    printed, names = io.StringIO(), {"__name__": "__main__"}
    with Simulation(1).running(), contextlib.redirect_stdout(printed):
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            exec(compile(block, "docs/howto/from_jax.md", "exec"), names)
    first, second, third = printed.getvalue().splitlines()
    assert first == "equal to rounding: True accuracy: 1.0"
    assert second == "the module's own loss: True"
    assert third == "['largest'] 64 64"


needs_mnist = pytest.mark.skipif(
    not (data_directory() or Path("/nowhere")).joinpath("mnist").is_dir(),
    reason="needs MNIST: set STEEPEST_DATA to a folder that has mnist/",
)


@needs_mnist
@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("strategy", mostly_full(["ps", "allreduce", "async"], "ps"))
def test_a_flax_network_learns_digits_though_a_worker_is_killed(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with imported("mnist_flax", "data") as found:
        seen = found["mnist_flax"].main(["--strategy", strategy, "--epochs", "1", "--kill", "200"])
    assert seen > 0.95
    printed = capsys.readouterr().out
    assert strategy == "async" or printed.endswith(": 1 workers replaced\n")  # it waits for nobody


@pytest.mark.full
@pytest.mark.usefixtures("machine")
def test_the_benchmark_of_frameworks_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.frameworks import main

    found = main(["--workload", "small", "--rounds", "2", "--steps", "2"])
    assert {who: len(times) for who, times in found["small"].items()} == {"plain": 2, "steepest": 2}
    assert re.match(r"small \(.*\): plain .* ms, steepest .* ms, ratio ", capsys.readouterr().out)
