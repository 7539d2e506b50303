"""Gates: forward passes that begin on the layers whose weights have come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from steepest.models.protocol import Arrive

_PASSES = 2  # gates are learned in so many passes, and must be the same in all of them
#: attributes and methods of a parameter that do not read its values
_HARMLESS = frozenset(
    {
        "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim",
        "is_cuda", "is_sparse", "names", "size", "dim", "stride", "numel", "nelement",
        "element_size", "is_floating_point", "is_complex", "is_contiguous", "data_ptr",
        "get_device", "storage_offset",
    }
)  # fmt: skip


class Gates:
    """The modules of a network at whose entrance a forward pass waits for weights.

    Which those are is learned by watching. In the first passes, which wait for all weights before
    they begin, a function mode of torch sees every use of a parameter; the gate of a parameter is
    the module that was entered last before its first use. The parameters of a module itself are
    waited for at its entrance in any case. Two equal passes in which every trainable parameter is
    used settle the gates. All other models wait for all weights: modules that are compiled or
    scripted, use parameters outside of any module, or take another way in each pass.

    Args:
        module: the network.
        entries: index of the layout's entry, by trainable parameter.

    Attributes:
        usable: whether passes wait at gates; None until that is learned.
    """

    def __init__(self, module: torch.nn.Module, entries: Mapping[torch.nn.Parameter, int]) -> None:
        self._module = module
        self._entries = {id(parameter): entry for parameter, entry in entries.items()}
        self._learned: list[dict[torch.nn.Module, set[int]]] = []
        self._arrive: Arrive | None = None
        self.usable: bool | None = False if any(map(_is_opaque, module.modules())) else None

    @contextlib.contextmanager
    def forward(self, arrive: Arrive) -> Iterator[None]:
        """Run one forward pass inside of this context; the pass waits for weights where it has to.

        Args:
            arrive: returns when the weights of an entry (of all, with None) are here.
        """
        if self.usable:
            self._arrive = arrive
            try:
                yield
            finally:
                self._arrive = None
            return
        arrive(None)
        if self.usable is None:
            watch = _Watch(self._entries)
            hooks = [
                child.register_forward_pre_hook(watch.enter) for child in self._module.modules()
            ]
            try:
                with watch:
                    yield
            finally:
                for hook in hooks:
                    hook.remove()
            self._learn(watch)
        else:
            yield

    def _learn(self, watch: _Watch) -> None:
        complete = not watch.outside and watch.seen == set(self._entries.values())
        self._learned.append(watch.gates)
        if not complete or self._learned[0] != watch.gates:
            self.usable = False
        elif len(self._learned) == _PASSES:
            self.usable = True
            for child in self._module.modules():
                own = {
                    self._entries[id(p)]
                    for p in child.parameters(recurse=False)
                    if id(p) in self._entries
                }
                if waited_for := sorted(watch.gates.get(child, set()) | own):
                    child.register_forward_pre_hook(self._gate(waited_for))

    def _gate(self, entries: list[int]) -> Callable[[torch.nn.Module, Any], None]:
        def enter(module: torch.nn.Module, inputs: Any) -> None:
            if self._arrive is not None:
                for entry in entries:
                    self._arrive(entry)

        return enter


class _Watch(TorchFunctionMode):
    """A function mode that records the module in which each parameter is first used."""

    def __init__(self, entries: Mapping[int, int]) -> None:
        super().__init__()
        self.gates: dict[torch.nn.Module, set[int]] = {}
        self.seen: set[int] = set()
        self.outside = False  # whether a parameter is used where no gate can be
        self._entries = entries
        self._entered: torch.nn.Module | None = None

    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        """Record that a module's forward pass begins."""
        self.outside |= torch.compiler.is_compiling()  # then this hook runs once, not in each pass
        self._entered = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(func) not in _HARMLESS:
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                entry = self._entries.get(id(tensor))
                if entry is not None and entry not in self.seen:
                    self.seen.add(entry)
                    self.outside |= self._entered is None
                    if self._entered is not None:
                        self.gates.setdefault(self._entered, set()).add(entry)
        return func(*args, **(kwargs or {}))


def _name(func: Any) -> str:
    """Return the name of a function, or of the attribute of which it is the getter."""
    name = getattr(func, "__name__", "")
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else str(name)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _is_opaque(module: torch.nn.Module) -> bool:
    """Return whether a module runs as something else than its own Python code."""
    compiled = (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )
    return compiled or isinstance(module, torch.jit.ScriptModule)
