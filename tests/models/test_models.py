"""Model: one contract for every framework."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from steepest.core.models.torch import accuracy
from tests.model_contract import (  # noqa: F401 - the contract, with this module's fixture
    Bound,
    DictModel,
    Records,
    X,
    Y,
    check_chunks_of_another_size_change_no_gradient,
    check_replicas_may_share_one_copy_of_the_weights,
    network,
    sgd,
    test_a_second_call_overwrites_the_first,
    test_evaluate_changes_nothing,
    test_evaluation_sources_give_batches_of_the_same_kind,
    test_gradients_equal_finite_differences,
    test_it_is_a_model,
    test_ready_is_called_once_for_each_entry_when_its_gradient_is_written,
    test_state_can_be_set_again,
    test_what_is_computed_is_reported,
    torch_model,
)
from tests.simulation.run import Simulation

OWN = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "own_model.py"))


def jax_model() -> Any:
    from tests.jax_tasks import classifier

    return classifier(X, Y)


CONTRACT: dict[str, Callable[[], Any]] = {
    "constructor": lambda: torch_model(metrics={"accuracy": accuracy}),
    "subclass": lambda: DictModel(network(), data=Records(), batch_size=4, optimizer=sgd),
    "example": lambda: OWN["LogisticRegression"]((X.numpy(), Y.numpy()), 2, 4),
    "jax": jax_model,
}
needs_jax = pytest.mark.skipif(not find_spec("jax"), reason="needs JAX: make test-jax")
EACH = [
    pytest.param(make, id=name, marks=needs_jax if name == "jax" else ())
    for name, make in CONTRACT.items()
]


@pytest.fixture(params=EACH)
def bound(request: pytest.FixtureRequest) -> Bound:
    return Bound(request.param())


# -- the contract ---------------------------------------------------------------------------------


def test_entries_are_ready_last_layers_first(bound: Bound) -> None:
    bound.compute()
    layers = [bound.layout.entries[index].name.split(".")[0] for index, _, _ in bound.calls]
    assert layers == sorted(layers, reverse=True) if layers[0].isdigit() else ["bias", "weight"]


@pytest.mark.parametrize("make", EACH)
def test_chunks_of_another_size_change_no_gradient(make: Callable[[], Any]) -> None:
    check_chunks_of_another_size_change_no_gradient(make)


@pytest.mark.parametrize("make", EACH)
def test_replicas_may_share_one_copy_of_the_weights(make: Callable[[], Any]) -> None:
    check_replicas_may_share_one_copy_of_the_weights(make)


# -- the example --------------------------------------------------------------------------------


def test_parameters_of_the_example_are_views_too() -> None:
    bound = Bound(CONTRACT["example"]())
    assert not bound.weights.any()
    before = bound.model.evaluate(bound.batch()).loss
    bound.weight("weight").fill_(1.0).view(-1)[0] = 5.0
    assert bound.model.evaluate(bound.batch()).loss != before


def test_the_example_learns_digits(capsys: pytest.CaptureFixture[str]) -> None:
    with Simulation(1).running():
        assert OWN["main"](["--strategy", "allreduce"]) > 0.85
    assert capsys.readouterr().out.startswith("test accuracy ")
