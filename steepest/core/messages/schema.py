"""One frozen dataclass for each kind of message: its fields, their limits, their places.

Each field is annotated with the values that it may hold. Fields that the header has a place for
name that place (`Header`); the others travel under their own names, and are left out if they
have their default. The dataclass determines how it becomes a message, how it is read from one,
and which messages are refused. Modules with bodies do without `from __future__ import annotations`,
which would turn annotations into text, whose evaluation takes 0.15 ms for each class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
)

from steepest.core.messages.fields import Field, Schema
from steepest.core.messages.message import KINDS, WHOLE, Message, MessageKind

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Return a decorator that does nothing: Python 3.10 has none of this name."""
        return lambda function: function


B = TypeVar("B", bound="Body")
_SLOTS = {  # places of a header, with their value in kinds that have no such field
    "generation": 0,
    "incarnation": 0,
    "sequence": 0,
    "version": 0,
    "chunk": -1,
    "weight": 0.0,
    "total": 0.0,
}


class Header(NamedTuple):
    """The place of a field in a message's header: `slot` is an attribute of `Message`."""

    slot: str
    # None for the limits that are always checked: version 0 to 2**62, chunks exist, weights 0 to 1e100
    limit: Field | None = None
    weighs: bool = False  # whether it is a weight of a gradient


#: The membership that a message belongs to, counted from 1; a message of an older one is void.
Generation = Annotated[int, Header("generation")]
#: The number of lives of the sending worker before the present one.
Incarnation = Annotated[int, Header("incarnation")]
#: A worker's own count of its pushes, or a client's of its requests.
Sequence = Annotated[int, Header("sequence")]
#: The number of updates of the weights that were committed.
Version = Annotated[int, Header("version")]
#: The index of a chunk of the flat vector.
Chunk = Annotated[int, Header("chunk")]


class Body:
    """The content of a message of one kind; `body` makes a subclass for each kind.

    It is immutable. Two are equal if they are of one kind and their fields are equal.

    Attributes:
        KIND: of the message.
        SCHEMA: the values that its fields may hold, see `steepest.core.messages.permissions`.
    """

    KIND: ClassVar[MessageKind]
    SCHEMA: ClassVar[Schema]

    def pack(self, payload: Any = None) -> Message:
        """Return a new message with this content, and a payload or none."""
        raise NotImplementedError

    @classmethod
    def unpack(cls: type[B], message: Message) -> B:
        """Return the content of a message of this kind.

        Raises:
            KeyError: a field is missing; `MessageCheck.check` refuses such a message of another
                process before.
        """
        raise NotImplementedError

    # Written here, because a dataclass compiles its own for each class, which takes 0.1 ms each.

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


@dataclasses.dataclass(frozen=True)
class _BodyField:
    """One field of a body: its name, place in the header, allowed values, default if it has one."""

    name: str
    slot: str | None
    field: Field | None
    weighs: bool
    default: Any
    keyword_only: bool

    @property
    def needed(self) -> bool:
        """Whether it has no default: messages that lack it are refused."""
        return self.default is dataclasses.MISSING


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def body(kind: MessageKind | None = None) -> Callable[[type[B]], type[B]]:
    """Return a decorator that makes a class of fields the body of a kind of messages.

    It gives the class `KIND`, `SCHEMA`, `pack`, `unpack` and `__init__`, and lets frames be of that kind. Without a
    kind the class is the base of bodies that have its fields.
    """

    def make(cls: type[B]) -> type[B]:
        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
        if kind is None:
            return cls
        assert KINDS.setdefault(int(kind), kind) is kind, f"{kind!r} has the number of another kind"
        parts = [_part(field) for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        cls.KIND, cls.SCHEMA = kind, _schema(parts)
        for name, function in _functions(cls, kind, parts).items():
            function.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, staticmethod(function) if name == "unpack" else function)
        return cls

    return make


def _part(field: dataclasses.Field[Any]) -> _BodyField:
    assert get_origin(field.type) is Annotated, f"{field.name}: annotate it with what it may hold"
    annotation = get_args(field.type)[1]
    header = annotation if isinstance(annotation, Header) else Header("", annotation)
    default = (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )
    return _BodyField(
        field.name, header.slot or None, header.limit, header.weighs, default, field.kw_only is True
    )


def _schema(parts: list[_BodyField]) -> Schema:
    inside = [part for part in parts if part.slot is None]
    return Schema(
        meta={part.name: part.field for part in inside if part.field is not None},
        required=tuple(part.name for part in inside if part.needed),
        header={part.slot: part.field for part in parts if part.slot and part.field is not None},
        names={part.slot: part.name for part in parts if part.slot},
        lowest_chunk=0 if any(part.name == part.slot == "chunk" for part in parts) else WHOLE,
        weighs=any(part.weighs for part in parts),
    )


def _functions(
    cls: type[Any], kind: MessageKind, parts: list[_BodyField]
) -> dict[str, Callable[..., Any]]:
    """Compile a body's `__init__`, `pack` and `unpack`, as dataclasses compile theirs."""
    known: dict[str, Any] = {"Message": Message, "kind": kind, "cls": cls, "nothing": {}}
    for part in parts:
        known[f"default_{part.name}"] = part.default
        known[f"read_{part.name}"] = part.field.read if part.field is not None else None
    lines = [*_init(parts), *_pack(parts), *_unpack(parts)]
    exec("\n".join(lines), known)
    return {name: known[name] for name in ("__init__", "pack", "unpack")}


def _init(parts: list[_BodyField]) -> list[str]:
    arguments = ["self"]
    for part in sorted(parts, key=lambda part: part.keyword_only):
        if part.keyword_only and "*" not in arguments:
            arguments.append("*")
        arguments.append(part.name if part.needed else f"{part.name}=default_{part.name}")
    return [
        f"def __init__({', '.join(arguments)}):",
        "    values = self.__dict__",
        *(f"    values[{part.name!r}] = {part.name}" for part in parts),
    ]


def _pack(parts: list[_BodyField]) -> list[str]:
    slots = {part.slot: part.name for part in parts if part.slot}
    head = [
        f"values[{slots[slot]!r}]" if slot in slots else repr(empty)
        for slot, empty in _SLOTS.items()
    ]
    inside = [part for part in parts if part.slot is None]
    always = ", ".join(f"{part.name!r}: values[{part.name!r}]" for part in inside if part.needed)
    lines = [
        "def pack(self, payload=None):",
        "    values = self.__dict__",
        f"    meta = {{{always}}}" if inside else "    meta = None",
    ]
    for part in inside:
        if not part.needed:
            differs = (
                " is not None"
                if part.default is None
                else f" != default_{part.name}"
                if part.default
                else ""
            )
            lines.append(f"    if values[{part.name!r}]{differs}:")
            lines.append(f"        meta[{part.name!r}] = values[{part.name!r}]")
    meta = "meta" if always or not inside else "meta or None"
    return [*lines, f"    return Message(kind, {', '.join(head)}, {meta}, payload)"]


def _unpack(parts: list[_BodyField]) -> list[str]:
    arguments = []
    for part in sorted(parts, key=lambda part: part.keyword_only):
        name = f"{part.name}=" if part.keyword_only else ""
        if part.slot is not None:
            arguments.append(f"{name}message.{part.slot}")
            continue
        read = f"read_{part.name}" if part.field is not None and part.field.read is not None else ""
        value = f"{read}(meta[{part.name!r}])"
        if not part.needed:
            value = f"{value} if {part.name!r} in meta else default_{part.name}"
        arguments.append(name + value)
    return [
        "def unpack(message):",
        "    meta = message.meta or nothing",
        f"    return cls({', '.join(arguments)})",
    ]


def limited(
    schema: Schema, header: Mapping[str, Field] = MappingProxyType({}), **meta: Field
) -> Schema:
    """Return a schema with other limits for fields in the header, by slot, and for other fields, by name."""
    assert meta.keys() <= schema.meta.keys(), f"it has no field {meta.keys() - schema.meta.keys()}"
    header, meta = {**schema.header, **header}, {**schema.meta, **meta}
    return dataclasses.replace(schema, header=header, meta=meta)


assert tuple(_SLOTS) == Message.__slots__[1:8], "a body packs its header by position"
