"""Weights that one worker has changed and not exchanged yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from steepest.core.tensors.layout import ParameterLayout

#: The key of a parameter's own weights, and of the weight of the samples behind them.
LOCAL, LOCAL_WEIGHT = "@local", "@local_weight"


def is_own_weight(name: str) -> bool:
    """Return whether "PARAMETER/KEY" names a worker's own weights rather than state of an optimizer."""
    return name.endswith((f"/{LOCAL}", f"/{LOCAL_WEIGHT}"))


@dataclass(frozen=True)
class OwnWeights:
    """A worker's weights in chunks that it has changed since their last exchange; never changed in place."""

    # by chunk, of each of its slices; None where it has the servers' weights
    values: Mapping[int, Sequence[torch.Tensor | None]] = field(default_factory=dict)
    # by chunk, the weight of the samples that have changed it since then
    since: Mapping[int, float] = field(default_factory=dict)
    # chunks that have been pushed: the servers' new values are to be taken in
    sent: frozenset[int] = frozenset()

    def write(self, layout: ParameterLayout, vector: torch.Tensor) -> None:
        """Write them to a flat vector."""
        for index, values in self.values.items():
            chunk = layout.chunks[index]
            views = layout.slice_views(chunk, layout.chunk_view(vector, index))
            for view, value in zip(views, values, strict=True):
                if value is not None:
                    view.copy_(value)

    def onto(self, layout: ParameterLayout, old: torch.Tensor, new: torch.Tensor) -> OwnWeights:
        """Return own weights that differ from those in `new` as these do from those in `old`, the servers' weights.

        Chunks that have been pushed are left as they are: their new values are to be taken in.

        Args:
            layout: of both flat vectors.
            old: from which these weights were computed.
            new: of a later version.
        """
        values = dict(self.values)
        for index in self.values.keys() - self.sent:
            before, now = (layout.chunk_view(vector, index) for vector in (old, new))
            if torch.equal(before, now):
                continue
            chunk = layout.chunks[index]
            pairs = zip(
                layout.slice_views(chunk, before), layout.slice_views(chunk, now), strict=True
            )
            values[index] = [
                None if value is None else value + (there - here)
                for value, (here, there) in zip(self.values[index], pairs, strict=True)
            ]
        return replace(self, values=values)

    def weight_of(self, chunk: int, more: float) -> float:
        """Return the weight of the samples behind a chunk's change, those of a share of the weight `more` included."""
        return self.since.get(chunk, 0.0) + more

    def after(
        self,
        layout: ParameterLayout,
        vector: torch.Tensor,
        weight: float,
        chunks: Collection[int],
        sent: Collection[int],
    ) -> OwnWeights:
        """Return the own weights after a share of samples, at whose end `vector` has the worker's weights.

        Args:
            layout: of the vector.
            vector: flat; the chunks that are kept are copied.
            weight: of the samples of the share.
            chunks: of which weights are kept.
            sent: those of them that have been pushed.
        """
        values = {
            index: [
                view.clone()
                for view in layout.slice_views(
                    layout.chunks[index], layout.chunk_view(vector, index)
                )
            ]
            for index in chunks
        }
        since = {c: 0.0 if c in sent else self.weight_of(c, weight) for c in chunks}
        return OwnWeights(values, since, frozenset(sent))

    def state(self, layout: ParameterLayout) -> dict[str, torch.Tensor]:
        """Return copies by "PARAMETER/@local" and "PARAMETER/@local_weight" (the weight, and 1 if it was pushed)."""
        state: dict[str, torch.Tensor] = {}
        for index, values in self.values.items():
            for piece, value in zip(layout.chunks[index].slices, values, strict=True):
                entry = layout.entries[piece.entry]
                if value is None:
                    continue
                whole = state.setdefault(
                    f"{entry.name}/{LOCAL}", torch.zeros(entry.shape, dtype=entry.dtype)
                )
                whole.view(-1)[piece.start : piece.stop] = value.reshape(-1)
                weight = [self.since[index], float(index in self.sent)]
                state[f"{entry.name}/{LOCAL_WEIGHT}"] = torch.tensor(weight, dtype=torch.float64)
        return state

    @classmethod
    def loaded(cls, layout: ParameterLayout, state: Mapping[str, torch.Tensor]) -> OwnWeights:
        """Return own weights from a `state`, whatever the layout's chunks were; unknown parameters are left out."""
        values: dict[int, list[torch.Tensor | None]] = {}
        since: dict[int, float] = {}
        sent: set[int] = set()
        for index in layout.trainable_chunks:
            parts: list[torch.Tensor | None] = []
            for piece in layout.chunks[index].slices:
                entry = layout.entries[piece.entry]
                value = state.get(f"{entry.name}/{LOCAL}")
                if value is None:
                    parts.append(None)
                    continue
                part = value.reshape(-1)[piece.start : piece.stop].clone()
                whole = part.numel() == entry.numel
                parts.append(part.view(entry.shape) if whole else part)
                weight, pushed = state[f"{entry.name}/{LOCAL_WEIGHT}"].tolist()
                since[index] = max(weight, since.get(index, 0.0))
                if pushed:
                    sent.add(index)
            if index in since:
                values[index] = parts
        return cls(values, since, frozenset(sent))

    def without(self, layout: ParameterLayout, names: Collection[str]) -> OwnWeights:
        """Return the own weights without some parameters, by name or alias, which get the servers' weights."""
        values = {
            index: [
                None if {entry.name, *entry.aliases} & set(names) else value
                for entry, value in zip(
                    (layout.entries[piece.entry] for piece in layout.chunks[index].slices),
                    parts,
                    strict=True,
                )
            ]
            for index, parts in self.values.items()
        }
        return replace(self, values=values)
