"""Embeddings of many features in one module, whose rows are pulled and pushed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from steepest.errors import ConfigurationError
from steepest.tables.modules.embedding import (
    TableModule,
    embeddings_apart,
    evenly,
    left_to_python,
    pooled_rows,
    require_padding,
)
from steepest.tables.modules.keyed_jagged import KeyedJagged, by_feature
from steepest.tables.rows.checks import require_ids
from steepest.tables.rows.lives import seconds_of
from steepest.tables.rows.table import Table
from steepest.tables.rows.texts import text_ids
from steepest.validation import require_choice

#: Ids of a feature: a tensor (B,) or (B, N), a jagged tensor (B, *), or B lists; or B texts, or lists of texts.
Ids = Tensor | Sequence[Sequence[int]] | Sequence[str]


class EmbeddingCollection(TableModule):
    """Embeddings of many features, whose rows are pulled and pushed together.

    Args:
        tables: by feature; features may share one.
        mode: "sum", "mean" or "max" of a sample's embeddings; None leaves them apart. Or a dict of these
            by feature, of all features.
        padding_idx: by feature, an id that is left out of bags, and whose embedding is zero where they
            stay apart; features without one need not be there.
        ttl: by feature, how long a row stays that the feature has had, see `Table.ttl`; the others have their
            table's. A row that several features have had stays until the last of these times is over.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        mode: str | Mapping[str, str | None] | None = "sum",
        padding_idx: Mapping[str, int] | None = None,
        ttl: Mapping[str, str | int] | None = None,
    ) -> None:
        if not isinstance(tables, Mapping):
            raise ConfigurationError(f"tables={tables!r:.80}: give a dict of features and Tables")
        super().__init__(list(tables.values()))
        modes = dict(mode) if isinstance(mode, Mapping) else dict.fromkeys(tables, mode)
        padding = {} if padding_idx is None else dict(padding_idx)
        if modes.keys() != tables.keys() or not padding.keys() <= tables.keys():
            raise ConfigurationError(
                f"mode of the features {sorted(modes)} and padding_idx of {sorted(padding)}: give a mode for "
                f"each of {', '.join(map(repr, tables))}, and a padding_idx for those that have one"
            )
        for feature, of in modes.items():
            what = "mode" if not isinstance(mode, Mapping) else f"mode[{feature!r}]"
            require_choice(what, of, (None, "sum", "mean", "max"))
        for feature, known in padding.items():
            require_padding(tables[feature], known)
        self.mode, self._lives = mode, _lives_of(tables, {} if ttl is None else ttl)
        self._features, self._modes, self._padding = dict(tables), modes, padding

    @left_to_python
    def forward(
        self,
        ids: Mapping[str, Ids] | KeyedJagged,
        per_sample_weights: Mapping[str, Tensor | Sequence[Sequence[float]]] | None = None,
    ) -> dict[str, Tensor]:
        """Return embeddings by feature.

        Args:
            ids: by feature, of each of B samples: a tensor (B,) or (B, N), a jagged tensor
                (`torch.nested`, layout `torch.jagged`), or B lists. Or all of it as TorchRec's
                `KeyedJaggedTensor`, with its weights.
            per_sample_weights: by feature, of those of mode "sum" that have some: a number for each
                id, in the form of the ids.

        Returns:
            (B, dim) of each feature. Without a mode of a tensor its shape and the table's dimension,
            else a jagged tensor `(B, *, dim)`.

        Raises:
            ConfigurationError: a feature is missing or unknown, or its ids or weights have another form.
        """
        if isinstance(ids, KeyedJagged) and not isinstance(ids, Mapping):
            ids, own_weights = by_feature(ids)
            per_sample_weights = own_weights if per_sample_weights is None else per_sample_weights
        weights_by_name = {} if per_sample_weights is None else per_sample_weights
        self._require_features(ids, weights_by_name)
        names = list(ids)
        ids = {name: _hashed(self._features[name], ids[name]) for name in names}
        parts = [_bags_of(name, ids[name]) for name in names]
        weights = [
            _weights_of(name, weights_by_name.get(name), part)
            for name, part in zip(names, parts, strict=True)
        ]
        kept = [self._kept(name, part[0]) for name, part in zip(names, parts, strict=True)]
        looked_up = [
            (self._features[name], part[0] if mine is None else part[0][mine])
            for name, part, mine in zip(names, parts, kept, strict=True)
        ]
        embedded: dict[str, Tensor] = {}
        lives = [self._lives[name] for name in names] if self._lives else None
        for of, rows, inverse in self._look_up(looked_up, lives):
            pieces = torch.split(inverse, [len(looked_up[at][1]) for at in of])
            of_each = dict(zip(of, pieces, strict=True))
            # one backward pass for all of a mode: each would have rows of zeros for the others' ids
            for mode in dict.fromkeys(self._modes[names[at]] for at in of):
                mine = [at for at in of if self._modes[names[at]] == mode]
                own = inverse if mine == of else torch.cat([of_each[at] for at in mine])
                if mode is None:
                    sizes = [len(of_each[at]) for at in mine]
                    pooled = embeddings_apart(rows, own)
                else:
                    bounds = [_among_kept(parts[at][1], kept[at]) for at in mine]
                    sizes = [part.shape[0] - 1 for part in bounds]
                    factors = _joined_weights([(weights[at], kept[at], of_each[at]) for at in mine])
                    pooled = pooled_rows(rows, own, _one_after_another(bounds), mode, factors)
                for at, part in zip(mine, torch.split(pooled, sizes), strict=True):
                    vectors = part
                    if mode is None:
                        vectors = _shaped(part, kept[at], ids[names[at]], parts[at][1])
                    embedded[names[at]] = vectors
        return {name: embedded[name] for name in names}

    def _require_features(self, ids: Any, weights: Any) -> None:
        """Check that there are ids for all features, and weights only for features of mode "sum"."""
        if not isinstance(ids, Mapping) or not isinstance(weights, Mapping):
            what = weights if isinstance(ids, Mapping) else ids
            raise ConfigurationError(
                f"ids are a {type(what).__name__}: give a dict of features and their ids"
                if what is ids
                else f"per_sample_weights are a {type(what).__name__}: give a dict of features and weights"
            )
        known = ", ".join(map(repr, self._features))
        if unknown := [name for name in ids if name not in self._features]:
            raise ConfigurationError(f"features {unknown}: give some of {known}")
        if missing := [name for name in self._features if name not in ids]:
            raise ConfigurationError(
                f"no ids of the features {missing}: give ids of each of {known}; a sample that has none of a "
                "feature has an empty list"
            )
        if wrong := [name for name in weights if self._modes.get(name) != "sum"]:
            raise ConfigurationError(
                f"per_sample_weights of the features {wrong}: give them for features of mode 'sum'"
            )

    def _kept(self, name: str, ids: Tensor) -> Tensor | None:
        """Return a mask (n,) of a feature's ids that are not padding; None if all are kept."""
        padding = self._padding.get(name)
        return None if padding is None else ids != padding


def _lives_of(tables: Mapping[str, Table], ttl: Mapping[str, str | int]) -> dict[str, int]:
    """Return by feature the seconds for which rows stay; an empty result if all are those of their tables."""
    if not isinstance(ttl, Mapping) or not ttl.keys() <= tables.keys():
        raise ConfigurationError(
            f"ttl={ttl!r:.80}: give a dict with some of the features {', '.join(map(repr, tables))}"
        )
    for name in ttl:
        if not tables[name].life:
            raise ConfigurationError(
                f"ttl of feature {name!r}, whose table {tables[name].name!r} keeps its rows: give Table(ttl=...) the "
                "time after which rows are removed that no feature with a time of its own has had"
            )
    own = {name: table.life for name, table in tables.items()}
    return (
        own | {name: seconds_of(f"ttl of feature {name!r}", of) for name, of in ttl.items()}
        if ttl
        else {}
    )


def _shaped(values: Tensor, kept: Tensor | None, ids: Ids, bounds: Tensor) -> Tensor:
    """Return embeddings (m, dim) of a feature that stay apart in the shape of its ids, zeros for those not kept."""
    if kept is not None:
        values = values.new_zeros(len(kept), values.shape[1]).index_put((kept,), values)
    if isinstance(ids, Tensor) and not ids.is_nested:
        return values.view(*ids.shape, -1)
    return torch.nested.nested_tensor_from_jagged(values, bounds)


def _among_kept(bounds: Tensor, kept: Tensor | None) -> Tensor:
    """Return where bags begin among the ids that are kept, and the end, (B + 1,)."""
    return bounds if kept is None else F.pad(kept.cumsum(0), (1, 0))[bounds]


def _weights_of(name: str, weights: Any, part: tuple[Tensor, Tensor]) -> Tensor | None:
    """Return a feature's weights, (n,), one for each id; None without any."""
    if weights is None:
        return None
    if isinstance(weights, Tensor):
        flat = weights.values() if weights.is_nested else weights.reshape(-1)
    else:
        flat = torch.tensor([value for each in weights for value in each])
    if flat.shape != part[0].shape or not flat.is_floating_point():
        raise ConfigurationError(
            f"per_sample_weights of feature {name!r} are {len(flat)} of {flat.dtype} for {len(part[0])} ids: "
            "give a floating-point number for each id"
        )
    return flat


def _joined_weights(of: Sequence[tuple[Tensor | None, Tensor | None, Tensor]]) -> Tensor | None:
    """Return the weights of several features' kept ids, ones where a feature has none; None without any.

    Args:
        of: for each feature its weights, a mask of the ids that are kept, and their rows.
    """
    weighted = [weights for weights, _, _ in of if weights is not None]
    if not weighted:
        return None
    parts = []
    for weights, kept, rows in of:
        if weights is None:
            parts.append(weighted[0].new_ones(len(rows)))
        else:
            parts.append(weights if kept is None else weights[kept])
    return torch.cat(parts)


def _one_after_another(bounds: Sequence[Tensor]) -> Tensor:
    """Return where bags begin in the concatenated ids of features, and the end."""
    first = bounds[0]
    if len(bounds) == 1:
        return first
    if len(first) > 1 and all(part is first for part in bounds):
        count, device = len(first) - 1, first.device
        size = int(first[-1]) // count
        if first is evenly(count, size, device):
            return evenly(count * len(bounds), size, device)
    begin, moved = 0, []
    for part in bounds:
        moved.append(part[:-1] + begin)
        begin += int(part[-1])
    return torch.cat([*moved, bounds[-1].new_tensor([begin])])


def _hashed(table: Table, ids: Any) -> Ids:
    """Return the ids of texts, in their form: an array or a list of texts as a tensor, lists of texts as lists."""
    if table.hash is None or isinstance(ids, Tensor):
        hashed: Ids = ids
        return hashed
    if isinstance(ids, np.ndarray) or all(isinstance(part, str) for part in ids):
        return torch.from_numpy(text_ids(ids, table.hash))
    return [text_ids(part, table.hash).tolist() for part in ids]


def _bags_of(name: str, ids: Ids) -> tuple[Tensor, Tensor]:
    """Return a feature's ids (n,), and where each sample's begin, with the end, (B + 1,)."""
    if isinstance(ids, Tensor) and ids.is_nested:
        if ids.layout != torch.jagged or ids.dim() != 2:
            raise ConfigurationError(
                f"a nested tensor of layout {ids.layout} and {ids.dim()} dimensions for feature "
                f"{name!r}: give one of layout torch.jagged, of a row of ids for each sample"
            )
        jagged: Any = ids
        return jagged.values(), jagged.offsets()
    if isinstance(ids, Tensor):
        if ids.dim() not in (1, 2):
            raise ConfigurationError(
                f"ids of shape {tuple(ids.shape)} for feature {name!r}: give (B,) or (B, N)"
            )
        size = ids.shape[1] if ids.dim() == 2 else 1
        return ids.reshape(-1), evenly(ids.shape[0], size, ids.device)
    sizes = [len(part) for part in ids]
    flat = np.concatenate(
        [np.empty(0, np.int64), *(require_ids(f"ids of feature {name!r}", part) for part in ids)]
    )
    bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return torch.from_numpy(flat), torch.from_numpy(bounds)
