"""A check that a model does not write to its own trainable parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import ModelError

_NOT_UNDONE = (
    "; with one worker, or under allreduce, it may keep what was written: restore() or "
    "set_weights() before you go on"
)
_address_of = torch._C.TensorBase.data_ptr  # a loop's own reading of addresses is watched
_SMALL = 1 << 16  # bytes of weights that are compared after each pass: it takes some microseconds


#: By parameter name: the dict of its module that holds the parameter, and its key there.
Holders = Mapping[str, tuple[dict[str, torch.nn.Parameter | None], str]]


class WriteCheck:
    """A check of one model's trainable parameters, around each of its passes.

    Only the optimizer changes them. Whether a forward pass' writes to them (clamping,
    `Embedding(max_norm=)`) reach other replicas would depend on how weights travel. After every
    pass, writes show in torch's version counters, in parameters that lie at another address, and in
    other objects in their places. Writes through `.data` show only when all values are compared
    with a copy, from which they are undone: in passes 1, 2, 4, 8 and so on, and in each pass if
    weights are few and come at once.
    """

    def __init__(self) -> None:
        self._passes = 0
        self._views: dict[str, torch.Tensor] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self._holders: list[tuple[dict[str, torch.nn.Parameter | None], str]] = []
        self._places: list[int] = []
        self._values = torch.empty(0, dtype=torch.int64)
        self._always = False

    def watch(
        self,
        layout: ParameterLayout,
        parameters: Mapping[str, torch.nn.Parameter],
        holders: Holders,
        weights: torch.Tensor,
    ) -> None:
        """Check these parameters from now on: views of the flat `weights`; `holders`: as `holders_of` returns them."""
        trained = [
            (i, entry) for i, entry in enumerate(layout.entries) if entry.trainable and entry.numel
        ]
        self._views = {entry.name: layout.entry_view(weights, i) for i, entry in trained}
        self._parameters = [parameters[name] for name in self._views]
        self._holders = [holders[name] for name in self._views]
        self._places = [view.data_ptr() for view in self._views.values()]
        end = max((entry.offset + entry.nbytes for _, entry in trained), default=0)
        # As integers they are fast to compare, and NaN equals NaN.
        self._values = weights[: -(-end // 64) * 64].view(torch.int64)
        self._always = end <= _SMALL and sum(chunk.trainable for chunk in layout.chunks) == 1

    @property
    def compares(self) -> bool:
        """Whether the next pass is compared with a copy, so that all weights must be here before it."""
        count = self._passes + 1
        return self._always or count & (count - 1) == 0

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Run a pass inside of this context.

        If it wrote to parameters, undo that as far as values are known, and raise ModelError.
        """
        values = self._values
        before = values.clone() if self.compares else None
        self._passes += 1
        versions = [parameter._version for parameter in self._parameters]
        try:
            yield
        finally:
            before = before if values is self._values else None  # `watch` was called meanwhile
            written = self._find(versions, before)
            if written is not None:
                self._put_back()
                if before is not None:
                    self._values.copy_(before)
        if written is not None:
            raise ModelError(refusal(written) + ("" if before is not None else _NOT_UNDONE))

    def reseat(self) -> str | None:
        """Restore parameters that lie at another address or were replaced; return the first one's name, or None."""
        if (name := self._find([p._version for p in self._parameters], None)) is not None:
            self._put_back()
        return name

    def _put_back(self) -> None:
        """Make every parameter a view of the weights, in its place in the module."""
        views = self._views.values()
        for parameter, (holder, key), view in zip(
            self._parameters, self._holders, views, strict=True
        ):
            parameter.data, holder[key] = view, parameter

    def _find(self, versions: list[int], before: torch.Tensor | None) -> str | None:
        """Return the name of the first parameter that was written to, or None."""
        now = zip(self._views, self._parameters, self._holders, versions, self._places, strict=True)
        for name, parameter, (holder, key), version, place in now:
            if (
                parameter._version != version
                or _address_of(parameter) != place
                or holder.get(key) is not parameter
            ):
                return name
        if before is None or torch.equal(before, self._values):
            return None
        differs = before.view(torch.uint8) != self._values.view(torch.uint8)
        at = self._values.data_ptr() + int(differs.nonzero()[0])
        return next(
            name for name, view in self._views.items() if at < view.data_ptr() + view.nbytes
        )


def holders_of(module: torch.nn.Module, names: Iterable[str]) -> Holders:
    """Return, by name, the dict of a module that holds each parameter, and its key there."""
    modules = dict(module.named_modules(remove_duplicate=False))
    split = {name: name.rpartition(".") for name in names}
    return {name: (modules[path]._parameters, key) for name, (path, _, key) in split.items()}


def refusal(name: str) -> str:
    """Return the text of the error for a trainable parameter that a model has written to."""
    return (
        f"the model has written to its trainable parameter {name!r}, which only the optimizer "
        "changes, because the "
        "other replicas would not see it: use a parametrization (torch.nn.utils.parametrize); for "
        "an embedding, normalise its output instead of giving max_norm=; or call set_weights() "
        "between steps"
    )
