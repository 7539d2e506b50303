"""What scripts keep beside modules (hidden states, replay buffers, running means) as plain values, and back in place.

Containers of Python, tensors, arrays, random generators, and objects whose class is plain Python are taken apart
by their kinds; nothing is pickled, and no code of a class runs when they are put together again.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from steepest.errors import ConfigurationError

#: A value as pack() takes it: a plain one as it is, else a tuple that begins with its kind.
Form = Any
#: Returns the class of a module and a qualified name, if the script has it.
FindClass = Callable[[str, str], type | None]

_SMALL = 1 << 16  # bytes of a value that is copied before each step
_EACH = 1 << 8  # as which an element of a container counts: to take it apart takes time
_PLAIN = (type(None), bool, int, float, str)
_DICTS: dict[str, type[dict[Any, Any]]] = {
    each.__name__: each for each in (dict, OrderedDict, defaultdict, Counter)
}
_FACTORIES = {each.__name__: each for each in (int, float, list, dict, set)}
_ALLOWED = (
    "numbers, text, tensors, arrays, lists, tuples, dicts, sets and deques of these, random generators, objects of "
    "plain Python classes that have these as attributes, or what has state_dict() and load_state_dict()"
)


def form_of(value: Any, path: str, within: tuple[int, ...] = ()) -> Form:
    """Return a value in plain values and tensors, which are the same; see `restored`.

    Args:
        value: what is kept.
        path: by which a reader finds it, for errors.
        within: the ids of what it is in.

    Raises:
        ConfigurationError: something cannot be kept, or has itself in it; it names the path.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.nbytes <= 8:
        return bool(value) if value.dtype.kind == "b" else value
    if id(value) in within:
        raise ConfigurationError(
            f"steepest.register(): {path} is a {kind.__name__} that it is in itself: keep what has no circles"
        )
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return ("tensor", value.detach(), value.device.type)
    within = (*within, id(value))

    def all_of(values: Iterable[Any]) -> list[Form]:
        return [form_of(each, f"{path}[{at}]", within) for at, each in enumerate(values)]

    if kind is np.ndarray and value.dtype.kind in "biufc":
        return ("array", value)
    if kind in (list, tuple):
        return (kind.__name__, all_of(value))
    if kind in (set, frozenset):
        return (kind.__name__, all_of(_in_order(value)))
    if kind is deque:
        return ("deque", all_of(value), value.maxlen)
    if kind in _DICTS.values():
        factory = getattr(value, "default_factory", None)
        if factory is not None and factory not in _FACTORIES.values():
            factory = None  # that of the script's own stays
        pairs = [
            (
                form_of(key, f"the key {key!r} of {path}", within),
                form_of(each, f"{path}[{key!r}]", within),
            )
            for key, each in value.items()
        ]
        return ("dict", kind.__name__, pairs, None if factory is None else factory.__name__)
    if kind in (bytes, bytearray):
        return (kind.__name__, np.frombuffer(bytes(value), dtype=np.uint8).copy())
    if (state := _state_of_generator(value)) is not None:
        return ("generator", kind.__name__, form_of(state, path, within))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ("named", kind.__module__, kind.__qualname__, all_of(value))
    if _is_plain_object(value):
        pairs = [
            (name, form_of(each, f"{path}.{name}", within)) for name, each in vars(value).items()
        ]
        return ("object", kind.__module__, kind.__qualname__, pairs)
    raise ConfigurationError(
        f"steepest.register(): {path} is a {kind.__name__}, which cannot be kept: give {_ALLOWED}"
    )


def restored(form: Form, old: Any, path: str, find: FindClass) -> Any:
    """Return the value of a form: what was there, if it is of the same kind, changed in place; else a new one.

    Of what is in it, containers and objects are changed in place too. Tensors and arrays in it are new: what was
    there may be a part of something else, as a sample of the data.

    Args:
        form: as `form_of` returned it.
        old: what is there.
        path: see `form_of`.
        find: finds classes.

    Raises:
        ConfigurationError: the script has no such class.
    """
    if not isinstance(form, tuple):
        return form
    kind = form[0]
    if kind in ("tensor", "array"):
        return _filled(form, old)
    if kind in ("bytes", "bytearray"):
        raw = form[1].numpy().tobytes()
        if kind == "bytearray" and type(old) is bytearray:
            old[:] = raw
            return old
        return raw if kind == "bytes" else bytearray(raw)
    if kind == "dict":
        return _restored_dict(form, old, path, find)
    if kind == "generator":
        return _restored_generator(form[1], restored(form[2], None, path, find), old)
    if kind == "object":
        target = old if _is_of(old, form) else object.__new__(_found(form, path, find))
        own = vars(target)
        for name in own.keys() - {name for name, _ in form[3]}:
            del own[name]
        for name, each in form[3]:
            own[name] = restored(each, _whole(own.get(name)), f"{path}.{name}", find)
        return target
    items = form[3] if kind == "named" else form[1]
    before = list(map(_whole, old)) if isinstance(old, (list, tuple, deque)) else []
    values = [
        restored(each, before[at] if at < len(before) else None, f"{path}[{at}]", find)
        for at, each in enumerate(items)
    ]
    if kind == "named":
        cls = type(old) if _is_of(old, form) else _found(form, path, find)
        return tuple.__new__(cls, values)
    if kind == "list" and type(old) is list:
        old[:] = values
        return old
    if kind == "deque":
        if type(old) is not deque or old.maxlen != form[2]:
            return deque(values, form[2])
        old.clear()
        old.extend(values)
        return old
    if kind == "set" and type(old) is set:
        old.clear()
        old.update(values)
        return old
    made: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return made(values)


def copied(form: Form) -> Form:
    """Return a form, or an object's state, with copies of its containers, tensors and arrays."""
    if isinstance(form, torch.Tensor):
        return form.detach().clone()
    if isinstance(form, np.ndarray):
        return form.copy()
    if isinstance(form, Mapping):
        return {key: copied(each) for key, each in form.items()}
    if isinstance(form, (list, tuple)):
        return type(form)(map(copied, form))
    return form


def is_small(value: Any) -> bool:
    """Return whether a value is small enough to be copied before each step."""
    return _size(value, _SMALL) <= _SMALL


def _size(value: Any, most: int) -> int:
    """Return the approximate size of a value in bytes; if it exceeds `most`, any number above `most`."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = value
    elif _is_plain_object(value):
        parts = vars(value).values()
    else:
        return _EACH
    total = 0
    for each in parts:
        total += _EACH
        if total > most:
            break
        total += _size(each, most - total)
    return total


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Return the members of a set, those of one type sorted, so that all workers have one order."""
    return sorted(
        values,
        key=lambda each: (type(each).__name__, each if isinstance(each, (int, float, str)) else 0),
    )


def _whole(old: Any) -> Any:
    """Return what is in a container, if that is to be changed in place."""
    return None if isinstance(old, (torch.Tensor, np.ndarray)) else old


def _filled(form: Form, old: Any) -> Any:
    """Return a tensor, or an array, in place of one of the same shape and type."""
    value = form[1]
    if form[0] == "array":
        array = value.numpy()
        is_like = type(old) is np.ndarray and (old.shape, old.dtype) == (array.shape, array.dtype)
        if not is_like or not old.flags.writeable:
            return array
        old[...] = array
        return old
    is_like = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype)
    if is_like and old.is_leaf:
        with torch.no_grad():
            return old.copy_(value)
    return value.to(form[2]) if form[2] != "cpu" else value


def _restored_dict(form: Form, old: Any, path: str, find: FindClass) -> Any:
    _, name, pairs, factory = form
    before = dict(old) if isinstance(old, dict) else {}
    entries = {}
    for key_form, each in pairs:
        key = restored(key_form, None, path, find)
        entries[key] = restored(each, _whole(before.get(key)), f"{path}[{key!r}]", find)
    if type(old) is _DICTS[name]:
        old.clear()
        for key, each in entries.items():
            old[key] = each
        return old
    if name == "defaultdict":
        return defaultdict(_FACTORIES.get(factory), entries)
    made: Any = _DICTS[name]
    return made(entries)


def _is_plain_object(value: Any) -> bool:
    """Return whether an object has no state but its attributes: its class is plain Python."""
    kind: Any = type(value)
    of_classes = {name for each in kind.__mro__[:-1] for name in vars(each)}
    own = {"__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__slots__"} & of_classes
    return (
        not own
        and hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, (torch.nn.Module, torch.utils.data.DataLoader))
    )


def _is_of(old: Any, form: Form) -> bool:
    return (type(old).__module__, type(old).__qualname__) == tuple(form[1:3])


def _found(form: Form, path: str, find: FindClass) -> type:
    _, module, name, *_ = form
    kind = find(module, name)
    is_named = form[0] == "named"
    if kind is None or (is_named and not issubclass(kind, tuple)):
        raise ConfigurationError(
            f"steepest.register(): {path} is a {name} of {module}, and the script has no such class at the top of a "
            "module: define it there"
        )
    return kind


def finder(function: Any) -> FindClass:
    """Return what finds classes among the globals of a user's function, and in modules that are imported."""
    globals_of: Mapping[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})

    def find(module: str, name: str) -> type | None:
        for space in (globals_of, vars(sys.modules[module]) if module in sys.modules else {}):
            value: Any = space.get(name.split(".")[0])
            for part in name.split(".")[1:]:
                value = None if value is None else vars(value).get(part)
            if isinstance(value, type) and value.__module__ == module:
                return value
        return None

    return find


def _state_of_generator(value: Any) -> Any:
    """Return the state of a random generator; None for anything else."""
    if type(value) is random.Random:
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return None


def _restored_generator(name: str, state: Any, old: Any) -> Any:
    made: Any
    if name == "Random":
        made = old if type(old) is random.Random else random.Random()
        made.setstate(state)
    elif name == "Generator" and isinstance(state, torch.Tensor):
        made = old if isinstance(old, torch.Generator) else torch.Generator()
        made.set_state(state)
    else:
        bits = state["bit_generator"]
        if name == "RandomState":
            made = old if isinstance(old, np.random.RandomState) else np.random.RandomState()
            made.set_state(state)
        else:
            is_like = (
                isinstance(old, np.random.Generator) and type(old.bit_generator).__name__ == bits
            )
            made = old if is_like else np.random.Generator(getattr(np.random, bits)())
            made.bit_generator.state = state
    return made
