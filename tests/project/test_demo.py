"""The demonstration's settings: what a careful user would choose for each strategy."""

from __future__ import annotations

from typing import Any

import pytest

from steepest import DistributedSGD
from tests.simulation.run import Simulation, pause, run_config

pytest.importorskip("sklearn", reason="the demo's digits: pip install 'steepest[demo]'")


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_asynchronous_training_learns_the_digits_although_a_worker_stalls(seed: int) -> None:
    from steepest.cli import demo

    train, test = demo.load_digits()
    creator, strategy = demo.settings("async", train, epochs=8)
    simulation = Simulation(seed)
    dice = simulation.dice

    def create(worker: int, device: int) -> Any:
        model = creator(worker, device)
        compute = model.compute_gradients

        def slow(*arguments: Any) -> Any:
            # now and then a worker is held up for as long as the other one takes for many updates
            pause(
                0.02 * dice.uniform(0.8, 1.2) * (dice.uniform(5, 30) if dice.random() < 0.03 else 1)
            )
            return compute(*arguments)

        model.compute_gradients = slow  # type: ignore[method-assign]
        return model

    with (
        simulation.running(),
        DistributedSGD(create, 2, strategy=strategy, run_config=run_config()) as trainer,
    ):
        trainer.fit(epochs=8, progress=False)
        assert trainer.stats().staleness.max >= 10
        assert trainer.evaluate(test).metrics["accuracy"] >= 0.96


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_its_table_has_the_same_bits_on_processes_and_on_ray(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from steepest.cli import demo

    rows = demo.run(epochs=1, progress=False)
    assert [(row.strategy, row.same) for row in rows if row.runtime == "ray"] == [
        ("ps", True),
        ("allreduce", True),
    ]
    assert all(row.difference is None or row.difference < 1e-12 for row in rows)
    assert capsys.readouterr().out.count(", the same bits as on processes\n") == 2
