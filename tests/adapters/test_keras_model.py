"""TensorFlowModel: the contract of all models, and what is Keras' own."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.adapters.keras_tools import double  # noqa: F401 - a fixture

import keras
import numpy as np
import pytest
import torch

from steepest.core.engine.generators import seed_everything
from steepest.errors import ConfigurationError, ModelError
from steepest.adapters.keras_variables import KerasVariables
from steepest.adapters.tensorflow import TensorFlowModel
from tests.model_contract import (  # noqa: F401 - the contract, with this module's fixture
    X,
    Y,
    Bound,
    check_chunks_of_another_size_change_no_gradient,
    check_replicas_may_share_one_copy_of_the_weights,
    test_a_second_call_overwrites_the_first,
    test_evaluate_changes_nothing,
    test_evaluation_sources_give_batches_of_the_same_kind,
    test_gradients_equal_finite_differences,
    test_it_is_a_model,
    test_ready_is_called_once_for_each_entry_when_its_gradient_is_written,
    test_state_can_be_set_again,
    test_what_is_computed_is_reported,
)
from tests.pairs import mostly_full

pytestmark = pytest.mark.usefixtures("double")


def network() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(size, "tanh") for size in (4, 3)]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2)])


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def keras_model(module: Any = None, **options: Any) -> TensorFlowModel:
    settings = {
        "loss": cross_entropy(),
        "data": (X, Y),
        "batch_size": 4,
        "optimizer": keras.optimizers.SGD(0.1),
        "metrics": ["accuracy"],
    } | options
    return TensorFlowModel(module or network(), **settings)


def compiled() -> TensorFlowModel:
    module = network()
    module.compile("sgd", cross_entropy(), metrics=["accuracy"])
    return TensorFlowModel(module, data=(X.numpy(), Y.numpy()), batch_size=4)


CONTRACT: dict[str, Callable[[], Any]] = {"given": keras_model, "compiled": compiled}


BOTH = mostly_full(CONTRACT, "given")  # which differ in who compiles the model


@pytest.fixture(params=BOTH)
def bound(request: pytest.FixtureRequest) -> Bound:
    return Bound(CONTRACT[request.param]())


def test_entries_are_ready_last_layers_first(bound: Bound) -> None:
    bound.compute()
    names = [bound.layout.entries[index].name for index, _, _ in bound.calls]
    assert names == [
        f"{layer}/{kind}"
        for layer in ("dense_2", "dense_1", "dense")
        for kind in ("bias", "kernel")
    ]


@pytest.mark.parametrize("make", BOTH)
def test_chunks_of_another_size_change_no_gradient(make: str) -> None:
    check_chunks_of_another_size_change_no_gradient(CONTRACT[make])


@pytest.mark.parametrize("make", BOTH)
def test_replicas_may_share_one_copy_of_the_weights(make: str) -> None:
    check_replicas_may_share_one_copy_of_the_weights(CONTRACT[make])


def test_the_example_of_the_docstring_runs() -> None:
    example = str(TensorFlowModel.__doc__).replace("  # doctest: +SKIP", "")
    data = {"x": np.zeros((64, 784)), "y": np.zeros(64, int), "TensorFlowModel": TensorFlowModel}
    parsed = doctest.DocTestParser().get_doctest(example, data, "example", None, None)
    assert doctest.DocTestRunner().run(parsed).failed == 0
    assert len(parsed.examples) > 3


# -- memory ---------------------------------------------------------------------------------------


class Empty(keras.layers.Layer):
    """A trained variable without elements."""

    def build(self, input_shape: Any) -> None:
        self.nothing = self.add_weight(shape=(0, 3), name="nothing")

    def call(self, x: Any) -> Any:
        return x


def odd() -> Any:
    """A model of variables that do not end on 64 bytes."""
    layers = [keras.layers.Dense(16), keras.layers.Dense(7), Empty(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((8,)), *layers])


def test_variables_of_any_size_share_the_memory_of_the_flat_vector() -> None:
    data = torch.randn(12, 8, dtype=torch.float64), torch.zeros(12, dtype=torch.int64)
    bound = Bound(keras_model(odd(), data=data))
    variables = bound.model._variables.parameters
    for name, variable in variables.items():
        assert bound.model._variables.value(variable).data_ptr() == bound.weight(name).data_ptr()
    first = bound.compute()
    bound.weights.view(torch.float64).add_(0.5)
    assert bound.compute().loss != first.loss
    assert all((bound.weight(n) == torch.from_numpy(v.numpy())).all() for n, v in variables.items())
    other = bound.layout.allocate()
    bound.model.move(other)
    assert bound.compute().loss == pytest.approx(float(torch.tensor(3.0).log()))
    assert not bound.model.keras_model.layers[0].kernel.numpy().any()


def test_what_the_model_writes_to_its_variables_does_not_reach_the_vector() -> None:
    bound = Bound(keras_model())
    before, module = bound.weights.clone(), bound.model.keras_model
    bound.compute()
    module.set_weights([value + 1 for value in module.get_weights()])
    assert torch.equal(bound.weights, before)
    with pytest.raises(
        ModelError, match=r"was assigned another value .* DistributedSGD.set_weights"
    ):
        bound.compute()
    bound.model.move(bound.weights)
    assert bound.compute() == bound.compute()


def test_a_model_that_writes_to_its_trained_variables_is_refused() -> None:
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    bound = Bound(keras_model(keras.Sequential([keras.Input((3,)), layer])))
    with pytest.raises(ModelError, match="writes to its trained variable 'spectral_norm"):
        bound.compute()


# -- names ----------------------------------------------------------------------------------------


class Block(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.scale = keras.layers.Dense(3), self.add_weight(shape=(), name="scale")
        self.shift = self.add_weight(shape=(), name="scale")

    def call(self, x: Any) -> Any:
        return self.dense(x) * self.scale + self.shift


class Subclass(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block(), Block()]
        self.head = keras.layers.Dense(2, name="head_7")
        self.norm = keras.layers.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.norm(self.blocks[1](self.blocks[0](x)), training=training))


def test_names_are_alike_however_many_models_a_process_has_made() -> None:
    for _ in range(2):
        bound = Bound(keras_model(Subclass()))  # which is not built
        assert bound.model._variables.trained == [
            f"{block}/{name}"
            for block in ("block", "block_1")
            for name in ("scale", "scale#2", "dense/kernel", "dense/bias")
        ] + [
            "head_7/kernel",
            "head_7/bias",
            *(f"batch_normalization/{n}" for n in ("gamma", "beta")),
        ]
        assert list(bound.model.state()) == [
            "batch_normalization/moving_mean",
            "batch_normalization/moving_variance",
        ]


# -- state, frozen layers -------------------------------------------------------------------------


def normalised() -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]
    )


def test_running_means_are_state_and_those_of_keras() -> None:
    bound, reference = Bound(keras_model(normalised())), normalised()
    reference.compile("sgd", cross_entropy())
    before = bound.model.state()
    bound.compute()
    state = bound.model.state()
    reference.train_on_batch(X[:4].numpy(), Y[:4].numpy())
    norm = reference.layers[1]
    assert np.allclose(state["batch_normalization/moving_mean"], norm.moving_mean, atol=1e-15)
    assert np.allclose(state["batch_normalization/moving_variance"], norm.moving_variance)
    loss = bound.model.evaluate(bound.batch()).loss
    bound.model.load_state(before)
    assert bound.model.evaluate(bound.batch()).loss != loss
    bound.model.load_state(state)
    assert bound.model.evaluate(bound.batch()).loss == loss
    with pytest.raises(ModelError, match="no variable of that name: was it made by another"):
        bound.model.load_state({"elsewhere": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"the model has one of shape \(4,\) of that name"):
        bound.model.load_state({"batch_normalization/moving_mean": torch.zeros(2)})


def test_frozen_layers_are_not_trained_and_take_installed_values() -> None:
    module = normalised()
    module.layers[0].trainable = False
    bound = Bound(keras_model(module))
    assert {e.name for e in bound.layout.entries if not e.trainable} == {
        "dense/kernel",
        "dense/bias",
    }
    bound.compute()
    assert {bound.layout.entries[index].name for index, _, _ in bound.calls} == {
        e.name for e in bound.layout.entries if e.trainable
    }
    bound.weight("dense/kernel").fill_(2.0)
    assert "dense/kernel" in bound.model.state()  # the model's differs from the installed one
    bound.model.load_state({})
    assert (module.layers[0].kernel.numpy() == 2.0).all()
    assert "dense/kernel" not in bound.model.state()
    module.layers[0].kernel.assign(np.ones((3, 4)))
    (changed,) = bound.model.state().keys() - bound.model._variables.state.keys()
    assert changed == "dense/kernel"


def test_random_layers_depend_on_the_seeded_step_alone() -> None:
    def make() -> Any:
        layers = [keras.layers.Dropout(0.5), keras.layers.Dense(2), keras.layers.GaussianNoise(1.0)]
        return keras.Sequential([keras.Input((3,)), *layers])

    first, second = (Bound(keras_model(make())) for _ in range(2))
    second.weights.copy_(first.weights)
    assert first.model.state() == {}
    losses = []
    for bound, seed in ((first, 1), (first, 2), (second, 2), (second, 1)):
        seed_everything(seed)
        losses.append(bound.compute().loss)
    assert losses[0] == losses[3] != losses[1] == losses[2]


# -- losses, weights, gradients --------------------------------------------------------------------


def gradients_of_keras(module: Any, batch: Any) -> list[Any]:
    """By Keras' own loss, on a whole batch."""
    import tensorflow as tf

    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        loss = module.compute_loss(x, y, module(x, training=True), weight)
    return tape.gradient(loss, [v.value for v in module.trainable_variables])


def mean_of_halves(model: TensorFlowModel, cut: int) -> dict[str, torch.Tensor]:
    """Two parts of the data, and their gradients' mean by weight."""
    bound = Bound(model)
    parts = []
    for rows in (range(cut), range(cut, 12)):
        computed = bound.compute(bound.batch(*rows))
        assert computed.samples == len(rows)
        parts.append((computed.weight, bound.gradients.clone().view(torch.float64)))
    total = sum(weight for weight, _ in parts)
    bound.gradients.view(torch.float64).copy_(sum(w / total * g for w, g in parts))
    return {e.name: bound.gradient(e.name) for e in bound.layout.entries if e.trainable}


def sequence() -> Any:
    """Numbers of words, of which zeros are masked."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((5,)), layers.Embedding(7, 3, mask_zero=True), layers.LSTM(2, return_sequences=True)]
    )  # fmt: skip


RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 7, (12, 5)) * (RNG.random((12, 5)) < 0.7)
WEIGHTS = RNG.random(12)
TARGETS = RNG.normal(size=(12, 5, 2))


@pytest.mark.parametrize(
    ("make", "loss", "data"),
    [
        (network, cross_entropy, (X, Y)),
        (network, cross_entropy, (X, Y, WEIGHTS)),
        (
            network,
            lambda: keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
            (X, Y, WEIGHTS),
        ),
        (sequence, lambda: "mse", (WORDS, TARGETS)),
        (
            sequence,
            lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            (WORDS, TARGETS, WEIGHTS[:, None] * np.ones((1, 5))),
        ),
    ],
    ids=["plain", "weights", "mean-by-weight", "mask", "mask-and-weights"],
)
def test_gradients_of_uneven_parts_have_keras_mean(make: Any, loss: Any, data: Any) -> None:
    module = make()
    module.compile("sgd", loss())
    arrays = tuple(np.asarray(array) for array in data)
    expected = gradients_of_keras(module, arrays)
    found = mean_of_halves(TensorFlowModel(module, data=arrays, batch_size=4), 5)
    for name, gradient in zip(KerasVariables(module).trained, expected, strict=True):
        assert np.allclose(found[name], keras.ops.convert_to_numpy(gradient), atol=1e-14), name


def TensorFlowNames(module: Any) -> list[str]:  # noqa: N802
    return KerasVariables(module).trained


def test_regularisation_losses_count_once_however_a_batch_is_divided() -> None:
    layer = keras.layers.Dense(2, kernel_regularizer="l2")
    module = keras.Sequential([keras.Input((3,)), layer])
    module.compile("sgd", cross_entropy())
    expected = gradients_of_keras(module, (X.numpy(), Y.numpy()))
    found = mean_of_halves(TensorFlowModel(module, data=(X, Y), batch_size=4), 5)
    assert np.allclose(found["dense/kernel"], expected[0], atol=1e-14)


def test_several_inputs_and_outputs_are_taken() -> None:
    one, two = keras.Input((3,), name="one"), keras.Input((1,), name="two")
    hidden = keras.layers.Dense(4)(keras.layers.Concatenate()([one, two]))
    outputs = {
        "a": keras.layers.Dense(2, name="a")(hidden),
        "b": keras.layers.Dense(1, name="b")(hidden),
    }
    module = keras.Model({"one": one, "two": two}, outputs)
    module.compile("sgd", {"a": cross_entropy(), "b": "mse"}, loss_weights={"a": 1.0, "b": 0.5},
                   metrics={"a": ["accuracy"], "b": ["mae"]})  # fmt: skip
    x = {"one": X.numpy(), "two": X[:, :1].numpy()}
    y = {"a": Y.numpy(), "b": X[:, 1:2].numpy()}
    model = TensorFlowModel(module, data=(x, y), batch_size=4)
    assert model.data.size == 12
    found = mean_of_halves(model, 7)
    for name, gradient in zip(
        KerasVariables(module).trained, gradients_of_keras(module, (x, y)), strict=True
    ):
        assert np.allclose(found[name], gradient, atol=1e-14), name
    computed = model.evaluate(next(model.data.open([np.arange(4)])))
    assert computed.metrics.keys() == {"a_accuracy", "b_mae", "a_loss", "b_loss"}
    parts = computed.metrics["a_loss"] + 0.5 * computed.metrics["b_loss"]
    assert computed.loss == pytest.approx(parts, abs=1e-14)


class OwnLoss(keras.Model):
    """A loss that no compile() has, and a variable that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.unused = self.add_weight(shape=(2,), name="unused")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred[:, 0] - keras.ops.cast(y, y_pred.dtype)))


def test_a_loss_of_the_models_own_and_variables_without_gradient() -> None:
    bound = Bound(keras_model(OwnLoss(), loss=None, metrics=None))
    bound.gradients.fill_(1)
    x, y = bound.batch()
    output = x @ bound.weight("dense/kernel") + bound.weight("dense/bias")
    assert bound.compute().loss == pytest.approx(float(((output[:, 0] - y) ** 2).mean()), abs=1e-14)
    present = {bound.layout.entries[index].name: there for index, _, there in bound.calls}
    assert present == {"dense/kernel": True, "dense/bias": True, "unused": False}
    assert not bound.gradient("unused").any()


def test_the_pages_gan_has_the_gradients_of_a_tape_for_each_half() -> None:
    import tensorflow as tf

    page = (Path(__file__).parents[2] / "docs" / "howto" / "from_tensorflow.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[-1]
    exec(compile(code, "docs/howto/from_tensorflow.md", "exec"), names := {})
    module, noise = names["gan"](), RNG.normal(size=(4, 4))
    model = TensorFlowModel(module, data=X[:, :2], batch_size=4)
    seed_everything(1)
    first = Bound(model).compute().loss
    seed_everything(2)
    assert Bound(model).compute().loss != first  # of other noise
    module.call = lambda real: module.generator(noise)
    model._network._functions.clear()
    bound = Bound(model)
    bound.compute()
    against = keras.losses.BinaryCrossentropy(from_logits=True)
    with tf.GradientTape(persistent=True) as tape:
        fake = module.generator(noise)
        scores = module.discriminator(X[:4, :2].numpy()), module.discriminator(fake)
        ones, zeros = np.ones((4, 1)), np.zeros((4, 1))
        critics = against(ones, scores[0]) + against(zeros, scores[1])
        makers = against(ones, scores[1])
    names = list(model._variables.parameters)
    count = len(module.generator.trainable_variables)
    for loss, part in ((makers, names[:count]), (critics, names[count:])):
        own = [model._variables.parameters[name].value for name in part]
        for name, expected in zip(part, tape.gradient(loss, own), strict=True):
            assert np.allclose(bound.gradient(name), expected, atol=1e-14), name
            assert bound.gradient(name).any()


def test_float32_and_half_precision_policies_are_taken() -> None:
    policy = keras.DTypePolicy("mixed_bfloat16")
    module = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(16, dtype=policy),
            keras.layers.Dense(2, dtype="float32"),
        ]
    )
    bound = Bound(keras_model(module))
    assert {entry.dtype for entry in bound.layout.entries} == {torch.float32}
    assert bound.compute().loss == pytest.approx(bound.model.evaluate(bound.batch()).loss)


def test_batches_of_new_shapes_are_taken_with_few_graphs() -> None:
    layers = keras.layers
    module = keras.Sequential([keras.Input((None,)), layers.Embedding(7, 3), layers.LSTM(2)])
    model = keras_model(module, data=(WORDS, Y))
    bound = Bound(model)
    for rows, length in ((3, 5), (4, 5), (4, 4), (2, 3), (1, 2)):
        assert bound.compute((WORDS[:rows, :length], Y[:rows].numpy())).samples == rows
    (function,) = model._network._functions.values()
    assert [shape.as_list() for shape in function._shapes] == [[None, None], [None]]


# -- bad input ------------------------------------------------------------------------------------


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return {}


def with_layer(layer: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])


def frozen() -> Any:
    module = network()
    module.trainable = False
    return module


def in_strategy() -> Any:
    import tensorflow as tf

    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        return network()


def masked_pair() -> Any:
    words = keras.Input((5,))
    hidden = keras.layers.Embedding(7, 3, mask_zero=True)(words)
    return keras.Model(words, [keras.layers.Dense(2)(hidden), keras.layers.Dense(2)(hidden)])


@pytest.mark.parametrize(
    ("make", "options", "error", "said"),
    [
        (lambda: "network", {}, ModelError, "keras_model is a str: give a keras.Model"),
        (network, {"optimizer": None}, ConfigurationError, "no optimizer: compile"),
        (
            network,
            {"optimizer": keras.optimizers.Lamb()},
            ConfigurationError,
            "is a Lamb: give one",
        ),
        (network, {"batch_size": None}, ConfigurationError, "batch_size=None: give"),
        (network, {"data": (X, Y[:5])}, ConfigurationError, "lengths"),
        (frozen, {}, ModelError, "nothing to train"),
        (lambda: OwnStep([keras.Input((3,)), keras.layers.Dense(2)]), {}, ModelError, "train_step"),
        (in_strategy, {}, ModelError, "scope of a tf.distribute strategy: make it outside"),
        (
            network,
            {"loss": keras.losses.SparseCategoricalCrossentropy(reduction="sum")},
            ConfigurationError,
            "reduction='sum', which depends on the number of workers",
        ),
        (
            lambda: with_layer(keras.layers.Dense(2, activity_regularizer="l2")),
            {},
            ModelError,
            "activity_regularizer, a sum over the batch",
        ),
        (
            lambda: with_layer(keras.layers.BatchNormalization(synchronized=True)),
            {},
            ModelError,
            "only synchronises under tf.distribute: leave synchronized out",
        ),
        (
            lambda: with_layer(keras.layers.Dense(2, kernel_constraint="non_neg")),
            {},
            ModelError,
            "'dense/kernel' has the constraint NonNeg, which servers do not apply",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    make: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        keras_model(make(), **options)


def test_losses_and_metrics_are_given_once() -> None:
    module = network()
    module.compile("sgd", cross_entropy())
    with pytest.raises(ConfigurationError, match="is compiled, and loss= or metrics= are given"):
        TensorFlowModel(module, loss="mse", data=(X, Y), batch_size=4)
    model = TensorFlowModel(module, optimizer="adam", data=(X, Y), batch_size=4)
    assert model.optimizer_spec.name == "KerasAdam"


def test_means_over_different_numbers_of_entries_are_refused() -> None:
    bound = Bound(
        keras_model(masked_pair(), loss="mse", metrics=None, data=(WORDS, TARGETS, TARGETS))
    )
    with pytest.raises(ModelError, match="several outputs, and masks"):
        bound.compute((WORDS, (TARGETS, TARGETS)))


def test_a_model_without_loss_says_so() -> None:
    bound = Bound(keras_model(loss=None, metrics=None))
    with pytest.raises(ValueError, match="No loss to compute"):
        bound.compute()
