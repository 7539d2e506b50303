"""Forward passes that begin before all weights are here, and wait for each that they read."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from steepest.core.models.protocol import Arrive, all_here


class Gates:
    """The parameters of a network, each of which a forward pass waits for before it is read.

    A pass whose weights are not all here begins with every parameter closed: an `AwaitedParameter`,
    at whose first use torch calls back. Then, or earlier, when the module that has it is entered,
    the pass waits for the weights of that parameter and opens it: it is the plain parameter again.
    No state outlasts the pass.

    Code that torch has compiled reads parameters without calling back. Once the process has any
    compiled code, each pass waits for all weights before it begins.

    Args:
        module: the network.
        entries: index of the layout's entry, by trainable parameter.
    """

    def __init__(self, module: torch.nn.Module, entries: Mapping[torch.nn.Parameter, int]) -> None:
        self._entries = dict(entries)
        owned = {
            id(child): [p for p in child.parameters(recurse=False) if p in self._entries]
            for child in module.modules()
        }
        self._owned = {child: parameters for child, parameters in owned.items() if parameters}
        self._scripted = any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())
        self._arrive: Arrive = all_here
        self._turn = threading.RLock()  # the model may compute on threads of its own

    @contextlib.contextmanager
    def forward(self, arrive: Arrive) -> Iterator[None]:
        """Run a forward pass inside of this context.

        `arrive` returns when the weights of an entry (None: of all) are here.
        """
        if arrive is all_here:
            yield
            return
        if self._scripted or _has_compiled():
            arrive(None)
            yield
            return
        self._arrive = arrive
        for parameter, entry in self._entries.items():
            if type(parameter) is torch.nn.Parameter:
                parameter._gates = self  # type: ignore[attr-defined]
                parameter.__class__ = AwaitedParameter
            else:  # a subclass may have a way of its own to be called back
                arrive(entry)
        entering = register_module_forward_pre_hook(self._enter)
        try:
            yield
        finally:
            entering.remove()
            for parameter in self._entries:
                _open(parameter)
            self._arrive = all_here

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        """Wait for the parameters of a module that is entered: it may read them in C++."""
        if isinstance(module, torch.jit.ScriptModule):
            self.wait_for_all()
        for parameter in self._owned.get(id(module), ()):
            self.wait(parameter)

    def wait(self, parameter: torch.nn.Parameter) -> None:
        """Wait for the weights of a parameter, and open it."""
        if type(parameter) is AwaitedParameter:
            with self._turn:
                self._arrive(self._entries[parameter])
                _open(parameter)

    def wait_for_all(self) -> None:
        """Wait for all weights, and open all parameters."""
        for parameter in self._entries:
            self.wait(parameter)


class AwaitedParameter(torch.nn.Parameter):
    """A closed parameter: the class that it has until its weights are here, see `Gates`."""

    _gates: Gates

    def __new__(cls, *arguments: Any, **named: Any) -> torch.nn.Parameter:  # type: ignore[misc]
        """Return a plain parameter, for code that makes one of the class of another."""
        return torch.nn.Parameter(*arguments, **named)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or get an attribute, when its parameters' weights are here."""
        kwargs = kwargs or {}
        awaited = [
            value
            for value in pytree.tree_leaves((args, kwargs), is_leaf=_is_tensor)
            if type(value) is AwaitedParameter
        ]
        for parameter in awaited:
            parameter._gates.wait(parameter)
        if not awaited:
            raise AssertionError(f"{func} was given an awaited parameter that was not found")
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the plain parameter."""
        self._gates.wait(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to unpickle the plain parameter."""
        self._gates.wait(self)
        return self.__reduce_ex__(protocol)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _open(parameter: torch.nn.Parameter) -> None:
    """Make a parameter a plain one again, if it is closed."""
    if isinstance(parameter, AwaitedParameter):
        del parameter._gates
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]


def _flatten(parameter: AwaitedParameter) -> tuple[list[Any], None]:
    parameter._gates.wait(parameter)
    return [parameter], None


# torch.func's transformations flatten their arguments, and read them without calling back.
pytree.register_pytree_node(AwaitedParameter, _flatten, lambda children, _: next(iter(children)))


def _has_compiled() -> bool:
    """Return whether this process has compiled, or scripted, any function with torch."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    frames = sys.modules.get("torch._dynamo.convert_frame")
    scripted: Any = torch.jit._state._python_cu
    return bool(
        (dynamo is not None and getattr(dynamo, "cached_backends", True))
        or (frames is not None and getattr(frames, "FRAME_COUNTER", 1))
        or scripted.get_functions()
        or torch.jit._recursive.concrete_type_store.type_store
    )
