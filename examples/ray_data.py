"""Ray Data prepares a table, and two workers train on it: each row is in one step of every epoch.

    python examples/ray_data.py                   # Adult from STEEPEST_DATA, else scikit-learn's tumours
    python examples/ray_data.py --data FOLDER     # a folder, or an address, of adult.data and adult.test

Adult has 48,842 people, of whom some earn over $50,000 (https://archive.ics.uci.edu/dataset/2/adult). After
5 epochs 86% of the test people are told rightly, the area under the ROC curve is 0.91.
Needs `pip install 'ray[data]' 'steepest[demo]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import ray
import torch
from torch import nn
from torch.nn import functional as F

try:
    from sklearn.datasets import load_breast_cancer
    from sklearn.metrics import roc_auc_score
except ImportError as error:
    raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

from steepest import DistributedSGD, RayDataset, TorchModel
from steepest.core.config.run import data_directory


def read(place: str | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return rows to train with and rows to test; what to learn is column "y", 0 or 1."""
    shared = data_directory()
    if place is None and shared is not None and (shared / "adult").is_dir():
        place = str(shared / "adult")
    if place is None:
        table = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "y"})
        return table[:400], table[400:]
    names = [*(f"column {number}" for number in range(14)), "y"]
    train, test = (
        pd.read_csv(f"{place}/{file}", names=names, comment="|", skipinitialspace=True)
        for file in ("adult.data", "adult.test")
    )
    train["y"], test["y"] = (table["y"].str.startswith(">").astype(int) for table in (train, test))
    return train, test


def preparation(train: pd.DataFrame) -> Callable[[pd.DataFrame], dict[str, np.ndarray]]:
    """Return the preparation of a batch of rows: numbers scaled, texts one-hot, by the training rows."""
    seen = train.drop(columns="y")
    numbers = list(seen.select_dtypes("number"))
    mean, deviation = seen[numbers].mean(), seen[numbers].std()
    kinds = {name: pd.CategoricalDtype(seen[name].unique()) for name in seen.drop(columns=numbers)}

    def prepare(rows: pd.DataFrame) -> dict[str, np.ndarray]:
        x = pd.get_dummies(rows[list(seen)].astype(kinds), dtype=float)
        x[numbers] = (x[numbers] - mean) / deviation
        return {"x": x.to_numpy("float32"), "y": rows["y"].to_numpy("float32")}

    return prepare


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the area under the ROC curve of the test rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder or address of adult.data and adult.test")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(argv)

    train, test = read(options.data)
    prepare = preparation(train)
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_pandas(train).repartition(8)  # or ray.data.read_parquet(...)
    rows = dataset.map_batches(prepare, batch_format="pandas").materialize()
    data = RayDataset(rows, ("x", "y"))  # computed once, before the workers take the CPUs
    tested = prepare(test)
    width = tested["x"].shape[1]

    def model_creator(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)),
            loss=F.binary_cross_entropy_with_logits,
            data=data,
            batch_size=64,
            optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=0.005),
            metrics={"accuracy": lambda score, y: ((score > 0) == (y > 0)).double().mean()},
        )

    with DistributedSGD(model_creator, options.workers) as sgd:
        sgd.fit(epochs=options.epochs)
        print(f"{sgd.stats().samples:,} rows in {options.epochs} epochs of {len(train):,}")
        right = sgd.evaluate((tested["x"], tested["y"])).metrics["accuracy"]
        scores = sgd.for_model(lambda model: model.module(torch.tensor(tested["x"])).detach())
    area = float(roc_auc_score(tested["y"], scores))
    print(f"{len(test):,} test rows: accuracy {right:.1%}, area under the ROC curve {area:.3f}")
    return area


if __name__ == "__main__":
    main()
