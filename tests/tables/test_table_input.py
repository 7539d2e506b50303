"""What jobs with embedding tables refuse: told as what it is, and nothing of the rows is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steepest import (
    DistributedSGD,
    Embedding,
    EmbeddingBag,
    ParameterServerStrategy,
    Table,
    TorchModel,
    connect,
)
from steepest.core.engine.job import ModelCreator
from steepest.errors import CheckpointError, ConfigurationError, ModelError, ModelRaisedError
from steepest.tables import LRU, SGD, LocalRows
from tests.reference import OptimizerFactory, sgd
from tests.simulation.run import Simulation, run_config

IDS, TARGETS = torch.arange(16).reshape(8, 2), torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]
WORDS = Table("words", 2, optimizer=SGD(lr=0.5), dtype="float64")


class Mistake:
    """What the model looks up instead of its batch."""

    ids: Tensor | None = None


@pytest.fixture(autouse=True)
def _mend() -> Iterator[None]:
    Mistake.ids = None
    yield
    Mistake.ids = None


class Net(nn.Module):
    """The mean of a bag of words, and a dense layer."""

    def __init__(self, table: Table = WORDS) -> None:
        super().__init__()
        self.words, self.head = EmbeddingBag(table), nn.Linear(2, 1).double()

    def forward(self, ids: Tensor) -> Tensor:
        wrong = Mistake.ids if self.training else None
        return self.head(self.words(ids if wrong is None else wrong[: len(ids)]).double())


class Pairs(nn.Module):
    """A dot product of rows, without any parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Embedding(WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        first, second = self.words(ids).unbind(1)
        return (first * second).sum(1, keepdim=True)


def creator(
    make: Callable[[], nn.Module] = Net, optimizer: OptimizerFactory | None = None, **settings: Any
) -> ModelCreator:
    return lambda worker, device: TorchModel(
        make(),
        loss=nn.functional.mse_loss,
        data=(IDS, TARGETS),
        batch_size=4,
        optimizer=optimizer or sgd(),
        **settings,
    )


@contextmanager
def simulated(
    make: Callable[[], nn.Module] = Net, strategy: Any = "ps", **settings: Any
) -> Iterator[DistributedSGD]:
    with (
        Simulation().running(),
        DistributedSGD(
            creator(make, **settings), 2, strategy=strategy, run_config=run_config()
        ) as trainer,
    ):
        yield trainer


def loss_of(trainer: DistributedSGD) -> float:
    return trainer.evaluate((IDS, TARGETS)).loss


@pytest.mark.parametrize("strategy", ["ps", "async", "allreduce"])
@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (IDS - 99, "ids of table 'words' hold -99: give integers from 0"),
        (IDS.double(), "ids of table 'words' are of float64: give integers"),
        (IDS[:, 0], r"ids of shape \(4,\), offsets none: give ids \(B, N\)"),
        (
            IDS + 16,
            "'words' has no room for .+ more ids beside its .+ rows: its capacity is 20; raise it",
        ),
    ],
)
def test_a_step_with_wrong_ids_changes_no_row(ids: Tensor, said: str, strategy: str) -> None:
    table = replace(WORDS, capacity=20)
    with simulated(lambda: Net(table), strategy, table_shards=4) as trainer:
        trainer.fit(steps=1, progress=False)
        before = loss_of(trainer)
        Mistake.ids = ids
        with pytest.raises(ModelRaisedError, match=said):
            trainer.step()
        assert loss_of(trainer) == before
        Mistake.ids = None
        trainer.step()
        assert loss_of(trainer) != before


@pytest.mark.parametrize("strategy", ["simple"])
def test_strategies_without_servers_have_no_tables(strategy: str) -> None:
    said = f"embedding tables under the strategy '{strategy}': .* give strategy='ps'"
    with pytest.raises(ConfigurationError, match=said), simulated(strategy=strategy):
        pass
    with simulated() as trainer:
        trainer.step()
        before = loss_of(trainer)
        with pytest.raises(ConfigurationError, match=said):
            trainer.set_strategy(strategy)
        assert loss_of(trainer) == before
        trainer.step()


def test_one_name_has_one_description_in_a_module() -> None:
    class Both(Net):
        def __init__(self) -> None:
            super().__init__()
            self.others = Embedding(replace(WORDS, dim=3))

    with pytest.raises(ConfigurationError, match="table 'words' has dim=2 and dim=3: describe it"):
        creator(Both)(0, 0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(WORDS, dim=3), "table 'words' with dim=2, the other has 3"),
        (
            replace(WORDS, capacity=9, eviction=LRU()),
            "table 'words' with capacity=None, the other has 9",
        ),
        (
            replace(WORDS, name="terms"),
            r"the embedding tables \['words'\], the other has \['terms'",
        ),
    ],
)
def test_one_name_has_one_description_in_all_workers(other: Table, said: str) -> None:
    def create(worker: int, device: int) -> TorchModel:
        found = creator(lambda: Net(other if worker else WORDS))(worker, device)
        assert isinstance(found, TorchModel)
        return found

    with (
        Simulation().running(),
        pytest.raises(ModelError, match=rf"worker 0 has {said}.* \(worker 1\)"),
    ):
        DistributedSGD(create, 2, run_config=run_config())


@pytest.mark.parametrize("shards", [0, -1, 2.0, True])
def test_the_number_of_shards_is_positive(shards: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"table_shards={shards}: give an integer"):
        creator(table_shards=shards)(0, 0)


def test_a_checkpoint_of_other_tables_is_refused(tmp_path: Path) -> None:
    with simulated() as trainer:
        trainer.step()
        trainer.save(str(tmp_path / "saved"))
        saved = loss_of(trainer)
    for table in (replace(WORDS, name="terms"), replace(WORDS, dtype="float32")):
        with simulated(partial(Net, table)) as trainer:
            before = loss_of(trainer)
            with pytest.raises(CheckpointError, match="its embedding table"):
                trainer.restore(str(tmp_path / "saved"))
            assert loss_of(trainer) == before
            trainer.step()
    with simulated(lambda: Net(replace(WORDS, capacity=99))) as trainer:
        trainer.restore(str(tmp_path / "saved"))
        assert loss_of(trainer) == saved


def test_a_module_that_the_job_does_not_know_says_so() -> None:
    class Hidden(Net):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [Embedding(WORDS)]  # a list is none of torch's: it registers nothing

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.hidden[0](ids).mean(1))

    with (
        simulated(Hidden) as trainer,
        pytest.raises(
            ModelRaisedError, match=r"Embedding\(words: 2\) has no rows: a trainer gives"
        ),
    ):
        trainer.step()


class Frozen(Net):
    """A bag whose rows are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words.requires_grad_(False)


HYBRID = ParameterServerStrategy(table_staleness=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "async", "ssp", "allreduce", "local", HYBRID])
def test_rows_of_a_frozen_embedding_are_neither_made_nor_changed(strategy: Any) -> None:
    def freeze(frozen: bool) -> None:
        trainer.foreach_model(lambda model: model.module.words.requires_grad_(not frozen) and None)

    with simulated(Frozen, strategy) as trainer:
        trainer.fit(steps=2, progress=False)
        dense = trainer.weights()
        assert len(trainer.export_table("words")) == 0
        freeze(False)
        trainer.fit(steps=8, progress=False)
        before = trainer.export_table("words")
        assert len(before) > 0
        freeze(True)
        trainer.fit(steps=2, progress=False)
        after = trainer.export_table("words")
        assert torch.equal(before.ids, after.ids)
        assert torch.equal(before.values, after.values)
        assert not torch.equal(dense["head.weight"], trainer.weights()["head.weight"])


def test_a_model_of_tables_alone_trains_as_in_a_loop_of_ones_own() -> None:
    net = Pairs()
    rows = connect(net)
    for _ in range(3):
        nn.functional.mse_loss(net(IDS), TARGETS).backward()
        rows.step()
    with simulated(Pairs) as trainer:
        trainer.fit(steps=3, progress=False)
        assert trainer.weights() == {"anchor": torch.zeros(())}
        expected = nn.functional.mse_loss(net(IDS), TARGETS).item()
        assert loss_of(trainer) == pytest.approx(expected, rel=1e-12)
    assert isinstance(rows, LocalRows)


def test_an_optimizer_without_the_parameter_of_a_model_of_tables_is_told_of() -> None:
    def other(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    with pytest.raises((ModelError, ConfigurationError)) as raised:
        creator(Pairs, optimizer=other)(0, 0)
    assert "module.parameters()" in str(raised.value)
