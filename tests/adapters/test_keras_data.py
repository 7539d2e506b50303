"""Data sets of tf.data: every element in exactly one step per epoch, on any number of workers."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.adapters.keras_tools import double  # noqa: F401 - a fixture

import keras
import numpy as np
import pytest
import tensorflow as tf

from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.adapters.tf_dataset import TensorFlowDataset
from steepest.errors import ConfigurationError
from steepest.adapters.tensorflow import TensorFlowModel
from steepest.testing import Fault, InProcessCluster, replay
from tests.reference import same_bits

NUMBERS = np.arange(50)
CARDINALITY = tf.data.experimental.assert_cardinality(50)


def numbers() -> Any:
    return tf.data.Dataset.from_tensor_slices((NUMBERS * 1.0, NUMBERS))


def rows(source: TensorFlowDataset, *shares: list[int]) -> list[list[int]]:
    batches = list(source.open([np.array(share) for share in shares]))
    assert all(np.array_equal(x, y) for x, y in batches)
    return [y.tolist() for _, y in batches]


@pytest.mark.parametrize("count", [3, 50, 2000])
def test_any_element_can_be_asked_for(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepest.adapters.tf_dataset._READ", 7)
    source = TensorFlowDataset(numbers().shuffle(count) if count < 2000 else numbers())
    shares = [[0, 1, 2], [2, 1], [7, 6], [49, 3, 48], [20, 21, 4], [0]]
    assert rows(source, *shares) == shares


def test_elements_are_read_once_an_epoch_where_shares_come_in_order() -> None:
    read: list[int] = []

    def note(x: Any) -> Any:
        read.append(int(x))
        return x

    dataset = numbers().map(lambda x, y: (tf.py_function(note, [x], tf.float64), y))
    source = TensorFlowDataset(dataset.shuffle(10).batch(5))
    assert (source.size, source.blocks, source.batch_size, source.drop_last) == (50, 10, 5, False)
    assert rows(source, *NUMBERS.reshape(10, 5).tolist()) == NUMBERS.reshape(10, 5).tolist()
    assert sorted(read) == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("make", "blocks", "batch", "drops"),
    [
        (lambda d: d, 1, None, False),
        (lambda d: d.batch(4, drop_remainder=True).prefetch(2), 1, 4, True),
        (lambda d: d.shuffle(100).repeat().batch(8, num_parallel_calls=2), 50, 8, False),
        (lambda d: d.cache().map(lambda x, y: (x, y)).shuffle(9).prefetch(1), 9, None, False),
        (lambda d: d.shuffle(9, seed=1, reshuffle_each_iteration=False).take(50), 1, None, False),
        (lambda d: d.batch(5).unbatch().apply(CARDINALITY).batch(3), 1, 3, False),
    ],
)
def test_what_ends_a_data_set_is_a_setting(
    make: Callable[[Any], Any], blocks: int, batch: int | None, drops: bool
) -> None:
    source = TensorFlowDataset(make(numbers()))
    found = source.size, source.blocks, source.batch_size, source.drop_last
    assert found == (50, blocks, batch, drops)
    (batch_,) = rows(source, list(range(50)))
    assert sorted(batch_) == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda d: d.filter(lambda x, y: y > 3), "assert_cardinality"),
        (lambda d: d.repeat().map(lambda x, y: (x, y)), "is infinite: give one pass"),
        (lambda d: d.take(0), "has no elements"),
        (lambda d: d.shuffle(9).map(lambda x, y: (x, y)), "call it last, or with seed="),
        (lambda d: d.batch(9).map(lambda x, y: (x, y)), r"a \.batch\(\) stands before the"),
        (lambda d: d.padded_batch(2), r"a \.paddedbatch\(\) stands before"),
        (
            lambda d: d.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False),
            "gives another order in each pass",
        ),
        (lambda d: d.map(lambda x, y: tf.RaggedTensor.from_tensor([[y]])), "RaggedTensorSpec"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_data_sets_that_cannot_be_divided_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        TensorFlowDataset(make(numbers()))


def test_a_length_that_was_told_wrongly_is_noticed() -> None:
    dataset = tf.data.Dataset.range(50).filter(lambda x: x > 3)
    source = TensorFlowDataset(dataset.apply(CARDINALITY))
    with pytest.raises(tf.errors.FailedPreconditionError, match="to contain 50 elements but"):
        list(source.open([np.array([49])]))


# -- exactly once -------------------------------------------------------------------------------------


class Seen(keras.Model):
    """Notes the samples of each step."""

    def __init__(self, seen: Counter[int]) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.note = seen.update  # Keras would copy the counter itself

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(x[:, tf.newaxis])

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.note(y.numpy().tolist())
        return keras.ops.mean(keras.ops.square(y_pred))


def creator(data: Callable[[], Any], seen: Counter[int]) -> Any:
    def create(worker_index: int, device_index: int) -> TensorFlowModel:
        keras.utils.set_random_seed(1)
        module = Seen(seen)
        module.compile(keras.optimizers.SGD(1e-4), run_eagerly=True)
        return TensorFlowModel(module, data=data())

    return create


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_element_is_in_one_step_per_epoch(workers: int) -> None:
    seen: Counter[int] = Counter()
    make = creator(lambda: numbers().shuffle(10).batch(3), seen)
    cluster = InProcessCluster(make, num_workers=workers)
    seen.clear()  # building the models looked at one element
    cluster.step(2 * -(-50 // (3 * workers)))
    assert seen == Counter(NUMBERS.tolist() * 2)


@pytest.mark.usefixtures("double")
def test_each_committed_element_counts_once_when_a_worker_dies() -> None:
    make = creator(lambda: numbers().shuffle(10).batch(3), Counter())
    settings = {"num_workers": 2, "strategy": ParameterServerStrategy(mode="async")}
    cluster = InProcessCluster(
        make,
        **settings,
        faults=[Fault.kill("worker", 1, step=3, at="report")],
        replaces=True,
        keep_log=True,
    )
    cluster.step(9)  # an epoch
    assert cluster.unmet == []
    places = Counter(n for _, begin, end in cluster.log().samples() for n in range(begin, end))
    assert places == Counter(range(50))
    assert same_bits(replay(cluster.log(), make), cluster.weights())
