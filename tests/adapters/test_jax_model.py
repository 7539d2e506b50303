"""JaxModel: memory, state, frozen parameters, modules of Flax, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs JAX: make test-jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import linen, nnx

from steepest import JaxModel, Model
from steepest.core.data.sampler import SamplePlan
from steepest.core.messages.driver import Failure
from steepest.core.tensors.layout import ChunkSpec
from steepest.errors import ConfigurationError, ModelError
from steepest.testing import InProcessCluster
from tests.jax_tasks import JaxTask, bound, network, squared_error
from tests.reference import difference

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(12, 2)).astype(np.float32)


def model(params: Any = None, **options: Any) -> JaxModel:
    params = network("float32") if params is None else params
    settings = {"loss": squared_error, "optimizer": optax.sgd(0.1), "data": (X, Y), "batch_size": 4}
    return JaxModel(params, **(settings | options))


def batch_of(given: JaxModel, *rows: int) -> Any:
    return next(iter(given.data.open([np.array(rows or (0, 1, 2, 3))])))


def compute(given: JaxModel, batch: Any, ready: Callable[..., None] = lambda *_: None) -> Any:
    torch.manual_seed(3)  # as the engine does before each batch
    return given.compute_gradients(batch, ready, True)


# -- memory -----------------------------------------------------------------------------------------


def test_parameters_of_any_size_are_read_in_place() -> None:
    sizes = {"a": 5, "b": (16, 4), "c": 64, "d": 3}
    params = {name: np.zeros(size, "f4") for name, size in sizes.items()}
    given = model(params, loss=lambda params, batch: params["a"].sum())
    weights, _ = bound(given)
    compute(given, batch_of(given))  # compiles
    for name, value in given._arguments()[0].items():
        array = jax.device_put(value)
        assert array.unsafe_buffer_pointer() == value.ctypes.data, name
    given.layout.entry_view(weights, given.layout.index["a"]).fill_(2)
    assert given.evaluate(batch_of(given)).loss == 10


def test_weights_may_change_as_soon_as_the_first_gradient_is_reported() -> None:
    """Servers in the same memory update what they have, while other gradients are still copied."""
    quiet, disturbed = model(), model()
    expected = bound(quiet)[1]
    first = compute(quiet, batch_of(quiet))
    weights, gradients = bound(disturbed)
    again = compute(disturbed, batch_of(disturbed), lambda *_: weights.fill_(0x7F))
    assert torch.equal(gradients, expected)
    assert first == again


def test_state_is_not_the_memory_of_weights() -> None:
    """A loss may return its parameters as state, or state that it was given."""

    def loss(params: Any, batch: Any, state: Any) -> Any:
        kept = {"average": params["0.weight"], "same": state["same"]}
        return squared_error(params, batch), None, kept

    zeros = {"average": np.zeros((3, 4), "f4"), "same": np.ones(16, "f4")}
    given = model(loss=loss, state=zeros)
    weights, _ = bound(given)
    compute(given, batch_of(given))
    before = given.state()
    assert torch.equal(
        before["average"], torch.from_numpy(np.array(network("float32")["0.weight"]))
    )
    weights.fill_(0)
    assert all(torch.equal(value, before[name]) for name, value in given.state().items())


def test_weights_that_lie_elsewhere_are_used_after_a_move() -> None:
    given = model()
    weights, _ = bound(given)
    loss = given.evaluate(batch_of(given)).loss
    other = weights.clone()
    given.move(other)
    weights.fill_(0)
    assert given.evaluate(batch_of(given)).loss == loss
    other.fill_(0)
    assert given.evaluate(batch_of(given)).loss == pytest.approx(float((Y[:4] ** 2).mean()))
    assert isinstance(given, Model)


# -- names ----------------------------------------------------------------------------------------


def test_weights_become_a_pytree_again() -> None:
    params = {"layers": [{"w": np.ones((2, 2))}, {"w": np.zeros(3, "f4")}], "b": np.arange(2.0)}
    named = JaxModel.named(params)
    assert named.keys() == {"layers/0/w", "layers/1/w", "b"}
    again = JaxModel.tree(named, like=params)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_parameters_are_to_be_had_as_they_are() -> None:
    given = model()
    weights, _ = bound(given)
    before = given.params
    weights.fill_(0)
    for kept, now, first in zip(
        *map(jax.tree.leaves, (before, given.params, network("float32"))), strict=True
    ):
        assert not np.any(now)
        np.testing.assert_array_equal(kept, first)


# -- frozen parameters and state ------------------------------------------------------------------


def test_frozen_parameters_stay_and_may_be_integers() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return squared_error(params["net"], batch) * params["factor"]

    task = JaxTask(
        lambda: {"net": network(), "factor": np.int32(2)},
        loss,
        settings={"frozen": lambda name: name in ("net/0.weight", "factor")},
    )
    cluster = InProcessCluster(task.creator(), num_workers=2)
    cluster.step(3)
    weights = cluster.weights()
    start = JaxModel.named({"net": network(), "factor": np.int32(2)})
    changed = {name for name, value in weights.items() if not torch.equal(value, start[name])}
    assert changed == {"net/0.bias", "net/2.bias", "net/2.weight"}
    assert cluster.state_dict().keys() == weights.keys()


def test_frozen_parameters_take_installed_values_and_state_that_differs() -> None:
    given = model(frozen=lambda name: name.startswith("0."))
    weights, _ = bound(given)
    assert given.state() == {}
    index = given.layout.index["0.bias"]
    given.layout.entry_view(weights, index).fill_(5)
    assert given.state().keys() == {"0.bias"}
    given.load_state({})
    assert given.state() == {}
    assert given.params["0.bias"].tolist() == [5.0] * 4
    given.load_state({"0.bias": torch.ones(4)})
    assert given.state()["0.bias"].tolist() == [1.0] * 4
    for bad in ({"0.bias": torch.ones(3)}, {"other": torch.ones(4)}):
        with pytest.raises(ModelError, match="made by another model"):
            given.load_state(bad)
    with pytest.raises(ModelError, match="'0.bias' is frozen here"):
        given.relayout(ChunkSpec(unfrozen=frozenset({"0.bias"})))


# -- modules of Flax --------------------------------------------------------------------------------


class Linen(linen.Module):
    rate: float = 0.5

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = linen.Dropout(self.rate, deterministic=not train)(x)
        return linen.Dense(2)(x)


class Nnx(nnx.Module):
    def __init__(self, rate: float = 0.5) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(self.norm(self.first(x))))


class NnxOfArguments(Nnx):
    """Keys and the mode come as arguments, as in Flax's own examples."""

    def __call__(self, x: Any, rngs: Any, *, train: bool) -> Any:  # type: ignore[override]
        hidden = self.norm(self.first(x), use_running_average=not train)
        return self.last(self.dropout(hidden, deterministic=not train, rngs=rngs))


class Fixed(Nnx):
    """Fine-tuning: the batch norm keeps its running averages, and nothing is dropped out."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__(rate)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0))
        self.norm.mean[...] += 0.5
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0))


class OfField(linen.Module):
    """The mode is a field, as many examples have it."""

    train: bool
    body: Any = None

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x if self.body is None else self.body(x)
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=not self.train)(linen.Dense(64)(x)))


def mean_squares(output: Any, target: Any) -> Any:
    return jnp.mean((output - target) ** 2)


def of_flax(kind: str, rate: float = 0.5, **options: Any) -> JaxModel:
    settings = {
        "loss": mean_squares,
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "data": (X, Y),
        "batch_size": 4,
        "metrics": {"error": lambda output, target: jnp.abs(output - target).mean()},
    } | options
    if kind != "linen":
        module = {"nnx-arguments": NnxOfArguments, "nnx": Nnx, "nnx-fixed": Fixed}[kind](rate)
        return JaxModel.from_flax(module, **settings)
    module = Linen(rate)
    return JaxModel.from_flax(module, module.init(jax.random.key(0), X, train=False), **settings)


@pytest.mark.parametrize("kind", ["linen", "nnx", "nnx-fixed"])
def test_modules_of_flax_train_as_in_a_plain_loop(kind: str) -> None:
    """Batch statistics are those of the plain loop, too; without dropout, whose keys are ours."""
    cluster = InProcessCluster(lambda worker, device: of_flax(kind, rate=0.0))
    cluster.step(5)
    plan, transformation = SamplePlan(12, 4, 0), optax.sgd(0.1, momentum=0.9)
    if kind != "linen":
        module = Fixed(0.0) if kind == "nnx-fixed" else Nnx(0.0)
        optimizer = nnx.Optimizer(module, transformation, wrt=nnx.Param)
        for step in range(5):
            x, y = X[plan.share(step, 0, 1)], Y[plan.share(step, 0, 1)]
            found = nnx.grad(lambda own, x, y: mean_squares(own(x), y))(module, x, y)
            optimizer.update(module, found)
        params, state = (nnx.to_pure_dict(nnx.state(module, t)) for t in (nnx.Param, nnx.BatchStat))
    else:
        module = Linen(0.0)
        variables = module.init(jax.random.key(0), X, train=False)
        params, stats = variables["params"], variables["batch_stats"]

        def loss(params: Any, stats: Any, x: Any, y: Any) -> Any:
            given = {"params": params, "batch_stats": stats}
            output, changed = module.apply(given, x, train=True, mutable=["batch_stats"])
            return mean_squares(output, y), changed["batch_stats"]

        kept = transformation.init(params)
        for step in range(5):
            x, y = X[plan.share(step, 0, 1)], Y[plan.share(step, 0, 1)]
            found, stats = jax.grad(loss, has_aux=True)(params, stats, x, y)
            updates, kept = transformation.update(found, kept, params)
            params = optax.apply_updates(params, updates)
        state = {"batch_stats": stats}
    expected = JaxModel.named(params) | JaxModel.named(state)
    assert difference(cluster.state_dict(), expected) < 1e-6
    if kind == "linen":  # as the page says
        given = {"params": params, **state}
        tree = {
            "params": JaxModel.tree(expected, like=given["params"]),
            **JaxModel.tree(expected, like={"batch_stats": given["batch_stats"]}),
        }
        assert jax.tree.all(jax.tree.map(jnp.array_equal, tree, given))


@pytest.mark.parametrize("kind", ["linen", "nnx", "nnx-arguments"])
def test_modules_of_flax_evaluate_without_dropout_and_change_nothing(kind: str) -> None:
    given = of_flax(kind)
    bound(given)
    before, batch = given.state(), batch_of(given)
    first = given.evaluate(batch)
    assert given.evaluate(batch) == first
    assert first.metrics.keys() == {"error"}
    assert all(torch.equal(value, before[name]) for name, value in given.state().items())
    trained = compute(given, batch)
    assert trained.loss != first.loss
    changed = given.state()
    assert not any(torch.equal(value, before[name]) for name, value in changed.items())
    given.load_state(before)
    assert compute(given, batch) == trained  # the same key for the same step and share
    torch.manual_seed(4)
    assert given.compute_gradients(batch, lambda *_: None, True) != trained


def test_modes_of_an_nnx_module_are_kept_in_training_and_named() -> None:
    assert of_flax("nnx").notice == ""
    assert "norm.use_running_average=True" in of_flax("nnx-fixed").notice
    module = Nnx()
    module.eval()
    settings = {"loss": mean_squares, "optimizer": optax.sgd(0.1), "data": (X, Y), "batch_size": 4}
    given = JaxModel.from_flax(module, **settings)
    said = "Nnx is trained with dropout.deterministic=True, norm.use_running_average=True, as it"
    assert given.notice.startswith(said)


def test_modes_that_are_fields_of_a_linen_module_are_set_in_evaluation_and_named() -> None:
    settings = {"loss": mean_squares, "optimizer": optax.sgd(0.1), "data": (X, Y), "batch_size": 4}
    variables = OfField(train=False).init(jax.random.key(0), X)
    given = JaxModel.from_flax(OfField(train=True), variables, **settings)
    bound(given)
    batch = batch_of(given)
    right = mean_squares(OfField(train=False).apply(variables, batch[0]), batch[1])
    assert given.evaluate(batch).loss == pytest.approx(float(right), rel=1e-6)
    assert compute(given, batch).loss != pytest.approx(float(right), rel=1e-3)
    assert (
        "OfField has modes as fields: train=True is kept in training, and set for" in given.notice
    )
    inner = linen.Sequential([linen.Dense(4), linen.Dropout(0.5, deterministic=False)])
    whole = OfField(train=False, body=inner)
    variables = whole.init(jax.random.key(0), X)
    given = JaxModel.from_flax(whole, variables, **settings)
    assert (
        "body.layers[1].deterministic=False is kept in training and in evaluation" in given.notice
    )


def test_what_is_no_module_of_flax_is_refused() -> None:
    plain = {"loss": mean_squares, "optimizer": optax.sgd(0.1), "data": (X, Y), "batch_size": 4}
    for module, variables, said in (
        (torch.nn.Linear(1, 1), None, "give a module of flax"),
        (Linen(), None, "module.init"),
        (Nnx(), {"params": {}}, "leave variables out"),
    ):
        with pytest.raises(ModelError, match=said):
            JaxModel.from_flax(module, variables, **plain)
    with pytest.raises(ConfigurationError, match="metrics"):
        JaxModel.from_flax(Nnx(), **plain, metrics={"accuracy": 3})


# -- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "options", "error", "said"),
    [
        ({}, {}, ModelError, "nothing to train"),
        (None, {"frozen": lambda name: True}, ModelError, "nothing to train"),
        ({"a": 1.0}, {}, ModelError, "'a' is float: give arrays"),
        ({"a": "b"}, {}, ModelError, "'a' is str: give arrays"),
        ({"a": np.arange(3, dtype="i4")}, {}, ModelError, "only floating-point .* frozen="),
        ({"a": np.zeros(3)}, {}, ModelError, "jax_enable_x64"),
        ({"a": jax.random.key(0)}, {}, ModelError, "give arrays"),
        ({"a": {"b": np.zeros(1, "f4")}, "a/b": np.zeros(1, "f4")}, {}, ModelError, "unique"),
        (None, {"state": {"0.bias": np.zeros(1, "f4")}}, ModelError, "are named '0.bias'"),
        (None, {"loss": None}, ConfigurationError, "loss is of type NoneType"),
        (None, {"frozen": ["a"]}, ConfigurationError, "frozen is of type list"),
        (None, {"weight": 3}, ConfigurationError, "weight is of type int"),
        (None, {"metrics": {"a": 1}}, ConfigurationError, "give functions of .aux, batch"),
        (None, {"learning_rate": "fast"}, ConfigurationError, "learning_rate='fast'"),
        (None, {"learning_rate": lambda step: "fast"}, ConfigurationError, "a finite number"),
        (None, {"optimizer": torch.optim.SGD}, ConfigurationError, "optax.sgd"),
        (None, {"data": {"x": X}}, ConfigurationError, "data is a dict"),
        (None, {"batch_size": 0}, ConfigurationError, "batch_size=0"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    params: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        model(params, **options)


@pytest.mark.parametrize(
    ("result", "options", "said"),
    [
        (lambda loss: loss * jnp.ones(2), {}, r"an array of shape \(2,\)"),
        (lambda loss: 1.0, {}, "the loss is float"),
        (lambda loss: loss + 1j, {}, "complex64"),
        (lambda loss: (loss, None, None), {}, "give state= to JaxModel"),
        (lambda loss: loss, {"state": np.zeros(1, "f4")}, r"return \(loss, aux, state\)"),
        (lambda loss: (loss, None, {}), {"state": np.zeros(1, "f4")}, "return the same"),
        (lambda loss: (loss, None, jnp.ones(2)), {"state": np.zeros(1, "f4")}, "return the same"),
        (lambda loss: (loss, {"a": jnp.ones(2)}), {}, r"metric 'a' is an array of shape \(2,\)"),
        (lambda loss: (loss, {1: loss}), {}, "metric 1 is"),
        (lambda loss: loss, {"metrics": {"a": lambda aux, batch: "b"}}, "metric 'a' is str"),
        (lambda loss: loss, {"weight": lambda batch: -1.0}, "the loss weighs -1.0"),
    ],
)
def test_a_loss_that_returns_something_else_is_a_failure_of_the_step(
    result: Callable[[Any], Any], options: dict[str, Any], said: str
) -> None:
    given = model(loss=lambda params, batch: result(squared_error(params, batch)), **options)
    bound(given)
    with pytest.raises(ModelError, match=said):
        compute(given, batch_of(given))


def test_gpus_are_refused() -> None:
    given = model()
    with pytest.raises(ConfigurationError, match="leave gpu=True out"):
        given.bind(torch.zeros(64, dtype=torch.uint8, device="meta"), given.layout.allocate())


def test_nan_is_not_applied_and_the_parameter_is_named() -> None:
    task = JaxTask(loss=lambda params, batch: squared_error(params, batch) * jnp.nan)
    cluster = InProcessCluster(task.creator(), num_workers=2)
    (failure,) = cluster.step(1)
    assert isinstance(failure, Failure)
    assert difference(cluster.weights(), JaxModel.named(network("float32"))) < 1e-6
