"""Adult for the examples: people with texts and numbers, and who earns over $50,000."""

from __future__ import annotations

import csv
import functools
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from steepest.core.config.run import data_directory

TEXTS, NUMBERS = (1, 3, 5, 6, 7, 8, 9, 13), (0, 4, 10, 11, 12)  # columns
Data = tuple[Tensor, Tensor, Tensor]  # ids (n, 8), numbers (n, 5), and 0 or 1 (n,)


def load(folder: Path | None = None) -> tuple[Data, Data]:
    """Return what to train with and what to test with; numbers have mean 0 and deviation 1.

    They are read from adult.data and adult.test in `folder`, or in STEEPEST_DATA's folder adult.
    Without either, scikit-learn's tumours take their place, with whole numbers for texts.
    """
    folder = folder_of(folder)
    if folder is None:
        train, test = tumours()
    else:
        train, test = (read(folder / name) for name in ("adult.data", "adult.test"))
    mean, deviation = train[1].mean(dim=0), train[1].std(dim=0)
    one, other = ((ids, (x - mean) / deviation, y) for ids, x, y in (train, test))
    return one, other


def folder_of(given: Path | None) -> Path | None:
    """Return the folder that is given, or STEEPEST_DATA's; None if there is neither."""
    shared = data_directory()
    if given is None and shared is not None and (shared / "adult").is_dir():
        return shared / "adult"
    return given


def read(path: Path) -> Data:
    with path.open() as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if len(row) == 15]
    ids = torch.tensor([[hashed(row[at]) for at in TEXTS] for row in rows])
    numbers = torch.tensor([[float(row[at]) for at in NUMBERS] for row in rows])
    return ids, numbers, torch.tensor([float(row[14].startswith(">")) for row in rows])


@functools.cache
def hashed(text: str) -> int:
    """Return 63 bits: no vocabulary is built."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def tumours() -> tuple[Data, Data]:
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

    x, y = (torch.tensor(part).float() for part in load_breast_cancer(return_X_y=True))
    ids = (10 * x[:, 20:28] / x[:, 20:28].max(dim=0).values).long()
    train, test = ((ids[part], x[part, :5], y[part]) for part in (slice(400), slice(400, None)))
    return train, test
