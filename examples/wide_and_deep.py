"""Embedding tables on servers, dense layers in step: who of Adult's people earns over $50,000?

    python examples/wide_and_deep.py --strategy ps        # or allreduce, async, ssp, hybrid

A person has eight texts, of which each finds a row of 8 numbers in a table, and five numbers. One
pass over 32,561 people takes 254 batches of 128, and leaves out the 49 that fill no batch. It ends at
a test AUC of 0.90 under each strategy. PERSIA publishes 0.8929 for its example with these tables and
layers. A text's id is its hash, and its row is made when it is first trained: texts are not counted
in advance. Under "hybrid" dense layers are in step, and rows may lack the last two updates.

Adult (https://archive.ics.uci.edu/dataset/2/adult) is read from `--data FOLDER` or STEEPEST_DATA.
Without either, 400 of scikit-learn's tumours take its place: a test of the program, no more. Needs
`pip install 'steepest[demo,embedding]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from adult import TEXTS, folder_of, load
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from sklearn.metrics import roc_auc_score
except ImportError as error:
    raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

from steepest import DistributedSGD, EmbeddingCollection, ParameterServerStrategy, Table, TorchModel
from steepest.tables import Adagrad, Uniform

STRATEGIES = ("ps", "allreduce", "async", "ssp", "hybrid")
FEATURES = [f"text {column}" for column in TEXTS]


def table(name: str) -> Table:
    return Table(name, 8, optimizer=Adagrad(lr=1e-2), initial=Uniform(-0.01, 0.01))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection({name: table(name) for name in FEATURES})
        self.of_texts = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128))
        self.of_numbers = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16))
        self.head = nn.Sequential(nn.Linear(144, 256), nn.Linear(256, 128), nn.Linear(128, 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        embedded = self.embeddings(dict(zip(FEATURES, ids.T, strict=True)))  # 8 of (batch, 8)
        texts = self.of_texts(torch.cat(list(embedded.values()), dim=1))
        return self.head(torch.cat([texts, self.of_numbers(numbers)], dim=1)).squeeze(dim=1)


class Income(TorchModel):
    def loss(self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, numbers, labels = batch
        return F.binary_cross_entropy_with_logits(self.module(ids, numbers), labels)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the test AUC."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="ps", choices=STRATEGIES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, help="folder of adult.data and adult.test")
    options = parser.parse_args(argv)
    source = "Adult" if folder_of(options.data) else "tumours"
    train, (ids, numbers, labels) = load(options.data)
    asynchronous = options.strategy in ("async", "ssp")  # each worker's batch is an update

    def create(worker_index: int, device_index: int) -> TorchModel:
        # an update of the few people that are left over would count as much as any other
        size = 128 if asynchronous else 128 // options.workers
        batches = DataLoader(TensorDataset(*train), batch_size=size, drop_last=True)
        return Income(
            Network(),
            data=batches,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )

    def scores(model: Income) -> torch.Tensor:
        with torch.no_grad():
            return model.module.eval()(ids, numbers)

    strategies = {"hybrid": ParameterServerStrategy(table_staleness=2)}
    strategy = strategies.get(options.strategy, options.strategy)
    with DistributedSGD(create, options.workers, strategy=strategy) as sgd:
        sgd.fit(epochs=1)
        area = float(roc_auc_score(labels, sgd.for_model(scores)))
        updates = sgd.stats().version
    print(f"{source}: {len(train[0]):,} samples, {updates} updates, test AUC {area:.4f}")
    return area


if __name__ == "__main__":
    main()
