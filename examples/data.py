"""MNIST for the examples: 70,000 handwritten digits as NumPy arrays."""

from __future__ import annotations

import gzip
import hashlib
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from steepest.core.config.run import data_directory

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MD5 = {  # of the files' contents, unpacked
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels, from 0 to 1

Arrays = tuple[np.ndarray, np.ndarray]


class Digits(NamedTuple):
    """Images (n, 1, 28, 28) in float32, normalised, and their classes (n,) in int64; to train with and to test."""

    source: str
    train: Arrays
    test: Arrays


def load_mnist(folder: Path | None = None) -> Digits:
    """MNIST from `folder` or from STEEPEST_DATA, whichever has it.

    Where neither has it, it is downloaded into `folder`; without a folder, scikit-learn's 1,797
    bundled digits, enlarged, take its place.
    """
    shared = data_directory()
    for place in (folder, shared / "mnist" if shared else None):
        if place is not None and all((place / f"{name}.gz").exists() for name in MD5):
            return Digits(f"MNIST in {place}", read(place, TRAIN), read(place, TEST))
    if folder is None:
        return load_small_digits()
    download(folder)
    return Digits(f"MNIST in {folder}", read(folder, TRAIN), read(folder, TEST))


def read(folder: Path, names: tuple[str, str]) -> Arrays:
    """Images and classes from two files."""
    pixels, classes = (unpack((folder / f"{name}.gz").read_bytes(), name) for name in names)
    return normalised(pixels[:, None] / np.float32(255)), classes.astype(np.int64)


def unpack(packed: bytes, name: str) -> np.ndarray:
    """The array in an idx file: two zeros, the type, the number of dimensions, each dimension, the values."""
    raw = gzip.decompress(packed)
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != MD5[name]:
        raise ValueError(
            f"{name}.gz is damaged: its checksum is not that of MNIST; delete the file"
        )
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def download(folder: Path) -> None:
    """Fetches MNIST's four files; each appears in the folder only when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MD5:
        with urllib.request.urlopen(f"{URL}{name}.gz", timeout=60) as answer:
            packed = answer.read()
        unpack(packed, name)
        part = folder / f"{name}.part"
        part.write_bytes(packed)
        part.replace(folder / f"{name}.gz")


def load_small_digits() -> Digits:
    """scikit-learn's digits of 8 x 8 pixels, enlarged to 28 x 28: 1,437 to train, 360 to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

    pixels, classes = load_digits(return_X_y=True)
    small = torch.as_tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    x = normalised(F.interpolate(small, size=28, mode="bilinear").numpy())
    y = classes.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1437], order[1437:]
    return Digits(
        "scikit-learn's digits, for want of MNIST", (x[train], y[train]), (x[test], y[test])
    )


def normalised(pixels: np.ndarray) -> np.ndarray:
    """Pixels from 0 to 1, moved and scaled to mean 0 and deviation 1."""
    return (pixels - np.float32(MEAN)) / np.float32(DEVIATION)
