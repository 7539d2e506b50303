"""TorchRec's `KeyedJaggedTensor` as it is, known by its methods: torchrec need not be installed."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from steepest.errors import ConfigurationError


@runtime_checkable
class KeyedJagged(Protocol):
    """Ids of several features, of a batch of B samples each: feature by feature, sample by sample.

    The methods used of torchrec.sparse.jagged_tensor.KeyedJaggedTensor.
    """

    def keys(self) -> list[str]:
        """Return the features."""

    def values(self) -> Tensor:
        """Return all ids, (n,)."""

    def lengths(self) -> Tensor:
        """Return how many ids each sample of each feature has, (features * B,)."""

    def weights_or_none(self) -> Tensor | None:
        """Return a weight of each id, (n,), if there are any."""


def by_feature(ids: KeyedJagged) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Return the ids of each feature as a jagged tensor (B, *), and likewise the weights, if there are any.

    Raises:
        ConfigurationError: features have different numbers of samples, or lengths and values do not fit.
    """
    names, values, lengths = ids.keys(), ids.values(), ids.lengths().long()
    weights = ids.weights_or_none()
    samples, rest = divmod(lengths.numel(), max(len(names), 1))
    if rest or lengths.dim() != 1 or int(lengths.sum()) != values.numel():
        raise ConfigurationError(
            f"a KeyedJaggedTensor of {len(names)} features with {lengths.numel()} lengths, whose sum is "
            f"{int(lengths.sum())}, and {values.numel()} values: give one whose features all have the same number "
            "of samples (no stride_per_key_per_rank)"
        )
    by_name: list[dict[str, Tensor]] = [{}, {}]
    begin = 0
    for name, of in zip(names, lengths.view(len(names), samples), strict=True):
        offsets = torch.nn.functional.pad(of.cumsum(0), (1, 0))
        end = begin + int(offsets[-1])
        for target, flat in zip(by_name, (values, weights), strict=True):
            if flat is not None:
                target[name] = _jagged(flat[begin:end], offsets)
        begin = end
    return by_name[0], None if weights is None else by_name[1]


def _jagged(values: Tensor, offsets: Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, offsets)
