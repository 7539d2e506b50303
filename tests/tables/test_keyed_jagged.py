"""TorchRec's KeyedJaggedTensor, and negatives that are drawn for a whole batch at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steepest import DistributedSGD, TorchModel
from steepest.errors import ConfigurationError
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.modules.embedding import connect
from steepest.tables.rows.local import LocalRows
from tests.page_examples import blocks_of
from tests.reference import same_bits, sgd
from tests.simulation.run import Simulation
from tests.table_tools import table


class KeyedJaggedTensor:
    """As torchrec's class of this name has its methods; made of lists of ids by feature."""

    def __init__(self, lists: dict[str, list[list[int]]], weights: Any = None) -> None:
        self._keys = list(lists)
        flat = [each for of in lists.values() for each in of]
        self._values = torch.tensor([id for each in flat for id in each], dtype=torch.int64)
        self._lengths = torch.tensor([len(each) for each in flat], dtype=torch.int32)
        self._weights = weights
        self.moved: list[Any] = []

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def to(self, device: torch.device) -> KeyedJaggedTensor:
        self.moved.append(device)
        return self

    def pin_memory(self) -> KeyedJaggedTensor:
        return self


LISTS = {"a": [[1, 1], [], [2**40]], "b": [[5], [6, 7, 7], []], "c": [[1], [2], [3]]}


def collection(**settings: Any) -> EmbeddingCollection:
    shared = table("words", 3)
    found = EmbeddingCollection({"a": shared, "b": shared, "c": table("c", 2)}, **settings)
    connect(found, LocalRows(found.tables, num_shards=2))
    return found


@pytest.mark.parametrize("mode", ["sum", "mean", {"a": "max", "b": None, "c": "sum"}])
def test_a_keyed_jagged_tensor_is_as_a_dict_of_lists(mode: Any) -> None:
    found = collection(mode=mode)
    ours, theirs = found(LISTS), found(KeyedJaggedTensor(LISTS))
    assert list(ours) == list(theirs)
    for name in ours:
        a, b = (each.values() if each.is_nested else each for each in (ours[name], theirs[name]))
        assert torch.equal(a, b)


def test_its_weights_are_those_of_its_ids() -> None:
    found = collection()
    weights = torch.arange(1.0, 11.0)
    lists = {
        "a": [[1.0, 2.0], [], [3.0]],
        "b": [[4.0], [5.0, 6.0, 7.0], []],
        "c": [[8.0], [9.0], [10.0]],
    }
    expected, weighed = found(LISTS, lists), found(KeyedJaggedTensor(LISTS, weights))
    assert all(torch.equal(expected[name], weighed[name]) for name in expected)
    means = collection(mode="mean")
    with pytest.raises(ConfigurationError, match="per_sample_weights of the features"):
        means(KeyedJaggedTensor(LISTS, weights))


@pytest.mark.filterwarnings("ignore")  # torchrec's and its libraries' own
def test_torchrecs_own_is_taken_as_it_is() -> None:
    torchrec = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="needs TorchRec")
    flat = [id for lists in LISTS.values() for ids in lists for id in ids]
    lengths = [len(ids) for lists in LISTS.values() for ids in lists]
    weights = torch.arange(1.0, 11.0)
    theirs = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=list(LISTS), values=torch.tensor(flat), lengths=torch.tensor(lengths), weights=weights
    )
    found = collection()
    expected, ours = found(KeyedJaggedTensor(LISTS, weights)), found(theirs)
    assert all(torch.equal(expected[name], ours[name]) for name in expected)


def test_what_does_not_fit_is_refused() -> None:
    wrong = KeyedJaggedTensor(LISTS)
    wrong._lengths = wrong._lengths[:-1]
    with pytest.raises(
        ConfigurationError, match="3 features with 8 lengths, whose sum is 9, and 10"
    ):
        collection()(wrong)
    with pytest.raises(ConfigurationError, match=r"no ids of the features \['c'\]"):
        collection()(KeyedJaggedTensor({name: LISTS[name] for name in "ab"}))


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = table("words", 3)
        self.found = EmbeddingCollection({"a": shared, "b": shared, "c": table("c", 3)})
        self.head = nn.Linear(9, 1)

    def forward(self, ids: Any) -> Tensor:
        out: Tensor = self.head(torch.cat(list(self.found(ids).values()), 1))
        return out


class Keyed(TorchModel):
    def loss(self, batch: Any) -> Tensor:
        ids, target = batch
        found: Tensor = (self.module(ids)[:, 0] - target).square().mean()
        return found


def trained(as_keyed: bool) -> dict[str, Tensor]:
    samples = [
        ({name: lists[at % 3] for name, lists in LISTS.items()}, float(at)) for at in range(12)
    ]

    def collate(batch: Any) -> Any:
        lists = {name: [sample[name] for sample, _ in batch] for name in LISTS}
        return KeyedJaggedTensor(lists) if as_keyed else lists, torch.tensor([t for _, t in batch])

    def create(worker_index: int, device_index: int) -> TorchModel:
        torch.manual_seed(0)
        data = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
        return Keyed(Scores(), data=data, optimizer=sgd())

    with Simulation(1).running(), DistributedSGD(create, 2) as found:
        found.fit(steps=6, progress=False)
        return found.weights()


def test_a_job_trains_on_batches_with_keyed_jagged_tensors() -> None:
    assert same_bits(trained(True), trained(False))


def test_the_page_of_negative_sampling_runs_and_repeats_its_draws(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (block,) = blocks_of("docs/howto/table_negatives.md")
    found: list[Any] = []
    with Simulation(1).running():
        code = compile(
            block.replace("epochs=8", "epochs=1"), "docs/howto/table_negatives.md", "exec"
        )
        for _ in range(2):
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(code, names)
            found.append(names["last"].loss)
    assert found[0] == found[1]
    seen = names["Seen"]()
    users, items, weighs = seen.__getitems__(np.arange(500).tolist())
    pairs = set((names["users"] * names["ITEMS"] + names["items"]).tolist())
    for user, row, of in zip(users.tolist(), items.tolist(), weighs.tolist(), strict=True):
        assert [user * names["ITEMS"] + item not in pairs for item in row[1:]] == of
