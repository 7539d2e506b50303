"""Texts as ids, by a hash that checkpoints name; numbers as ids, by buckets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steepest import Bucketize, ServedTable, TorchModel
from steepest.errors import CheckpointError, ConfigurationError
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.modules.embedding import Embedding, EmbeddingBag, connect
from steepest.tables.rows.row_optimizers import SGD
from steepest.tables.rows.table import Table
from steepest.tables.rows.texts import HASHES, text_ids
from tests.reference import same_bits, sgd
from tests.table_jobs import trainer

NAMES = np.array(["anna", "bob", "anna", "zoë", "", "bob", "eve", "anna", "日本", "bob", "f", "g"])
BAGS = np.stack([NAMES, NAMES[::-1]], axis=1)


def table(name: str, **settings: Any) -> Table:
    return Table(name, 3, **{"optimizer": SGD(lr=0.5), "dtype": "float64"} | settings)


class People(nn.Module):
    """Names and bags of names, looked up as texts or, without a hash, as ids."""

    def __init__(self, hashed: str | None) -> None:
        super().__init__()
        self.names = Embedding(table("names", hash=hashed))
        self.bags = EmbeddingBag(table("bags", hash=hashed))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, names: Any, bags: Any) -> Tensor:
        found: Tensor = (self.names(names) * self.bags(bags)).sum(-1) + self.bias
        return found


def job_data(hashed: str | None) -> tuple[Any, Any, Tensor]:
    targets = torch.linspace(-1, 1, len(NAMES), dtype=torch.float64)
    if hashed is not None:
        return NAMES, BAGS, targets
    return torch.from_numpy(text_ids(NAMES)), torch.from_numpy(text_ids(BAGS)), targets


def creator(hashed: str | None) -> Any:
    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            People(hashed),
            loss=nn.functional.mse_loss,
            data=job_data(hashed),
            batch_size=2,
            optimizer=sgd(),
        )

    return create


def rows_in(trainer: Any) -> dict[str, Any]:
    exports = {name: trainer.export_table(name) for name in ("names", "bags")}
    return {name: dict(zip(e.ids.tolist(), e.values, strict=True)) for name, e in exports.items()}


def test_ids_are_those_of_every_program() -> None:
    """What a checkpoint of last year has been trained with."""
    assert text_ids(["anna", "zoë", ""]).tolist() == [
        7503624139547223366,
        2961568833637562097,
        8238016292129134938,
    ]
    assert text_ids(BAGS).tolist() == [text_ids(row).tolist() for row in BAGS]
    assert text_ids(np.array(NAMES, dtype=object)).tolist() == text_ids(NAMES).tolist()
    assert text_ids([]).shape == (0,)


@pytest.mark.parametrize("wrong", [[1, 2], [b"anna"], np.array(["anna", None]), [1.5]])
def test_what_is_no_text_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no text"):
        text_ids(wrong)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_texts_train_as_their_ids_do(workers: int) -> None:
    found = []
    for hashed in ("blake2b", None):
        with trainer(creator(hashed), workers=workers) as job:
            job.fit(epochs=2, progress=False)
            held_out = (*job_data(hashed)[:2], torch.zeros(len(NAMES), dtype=torch.float64))
            found.append((job.state_dict(), rows_in(job), job.evaluate(held_out).loss))
    (weights, rows, loss), (others, other_rows, other_loss) = found
    assert same_bits(weights, others)
    assert loss == other_loss
    for name, own in rows.items():
        assert own.keys() == other_rows[name].keys() == set(text_ids(NAMES).tolist())
        assert all(torch.equal(own[each], other_rows[name][each]) for each in own)


def test_a_checkpoint_names_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(creator("blake2b")) as job:
        job.fit(epochs=1, progress=False)
        job.save(tmp_path)
        saved = rows_in(job)
        served = ServedTable(job.export_table("names"))
    looked_up = served(torch.from_numpy(text_ids(["zoë"])))[0]
    assert torch.equal(looked_up, saved["names"][int(text_ids("zoë"))])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["hashes"] == {"names": "blake2b", "bags": "blake2b"}
    for hashed in ("blake2b", None):  # who hashes before may go on
        with trainer(creator(hashed)) as job:
            job.restore(tmp_path)
            found = rows_in(job)
            assert found.keys() == saved.keys()
            assert all(torch.equal(found["names"][n], v) for n, v in saved["names"].items())
    monkeypatch.setitem(HASHES, "crc", len)
    with (
        trainer(creator("crc")) as job,
        pytest.raises(CheckpointError, match="'bags' are texts hashed by 'blake2b', this job's by"),
    ):
        job.restore(tmp_path)


def test_a_collection_takes_texts_in_each_form() -> None:
    people = table("people", hash="blake2b")
    one, other = EmbeddingCollection({"a": people}, mode=None), EmbeddingCollection({"a": people})
    connect(nn.ModuleList([one, other]))
    ids = torch.from_numpy(text_ids(BAGS))
    expected = one({"a": ids})["a"]
    assert torch.equal(one({"a": BAGS})["a"], expected)
    assert torch.equal(one({"a": list(NAMES)})["a"], expected[:, 0])
    pooled = other({"a": ids})["a"]
    assert torch.equal(other({"a": BAGS.tolist()})["a"], pooled)
    ragged = other({"a": [["anna"], [], ["bob", "eve"]]})["a"]
    assert torch.equal(ragged[1], torch.zeros(3, dtype=torch.float64))
    assert torch.equal(
        ragged[2], other({"a": torch.from_numpy(text_ids([["bob", "eve"]]))})["a"][0]
    )


def test_what_a_table_of_texts_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="hash='md5' of table 'names': give one of"):
        table("names", hash="md5")
    with pytest.raises(ConfigurationError, match="leave that out"):
        table("names", hash="blake2b", num_embeddings=10)
    module = Embedding(table("names"))
    connect(module)
    with pytest.raises(ConfigurationError, match=r"or Table\(hash='blake2b'\) texts"):
        module(["anna"])


def test_numbers_are_in_the_bucket_of_their_boundaries() -> None:
    module = Bucketize([18, 25.5, 65])
    values = torch.tensor([[-math.inf, 17.9], [18, 25.5], [64.9, 1e9], [math.nan, 65]])
    assert module(values).tolist() == [[0, 0], [1, 2], [2, 3], [4, 3]]
    assert module(values).max() < module.num_embeddings == 5
    expected = np.digitize(values.double().numpy()[:3], [18, 25.5, 65])
    assert module(values)[:3].tolist() == expected.tolist()
    assert module.state_dict() == {}
    for wrong in ([], [2, 1], [1, 1], [1, math.nan], [[1, 2]]):
        with pytest.raises(ConfigurationError, match="give one or more finite numbers"):
            Bucketize(wrong)  # type: ignore[arg-type]
