"""One class for each kind of message, its body: a frozen struct of msgspec, whose types say what each field may hold.

A body travels as a MessagePack array of its fields. What arrives is checked when it is read: types by msgspec, then the
conditions in annotations, which know the limits of a job.
"""

from __future__ import annotations

import re
import reprlib
import types
from collections.abc import Callable
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from steepest.core.messages.fields import MOST, Condition, Limits
from steepest.core.messages.message import KINDS, Message, MessageKind
from steepest.errors import MessageTooLargeError, ProtocolError

MAX_BODY = 4 << 20
_FEW_BYTES = 1 << 16  # of a body whose lists and maps need not be counted
# lists and maps in a body; a page of the log has half as many at most
_MOST_PARTS = 1 << 19
# bytes with which a list or map begins in MessagePack; in texts and numbers they are something else
_PARTS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
_OTHERS = bytes(set(range(256)) - set(_PARTS))
_PLACE = re.compile(r"\$\[(\d+)\]")
# Errors show the outer levels of a value: its whole `repr` may be long, and lists within a thousand lists have none.
_shown = reprlib.Repr()
_shown.maxlist = _shown.maxtuple = _shown.maxdict = 16
_shown.maxstring = _shown.maxother = 80
B = TypeVar("B", bound="Body")


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a message of one kind; immutable. `body` names the kind.

    Attributes:
        KIND: of the message.
    """

    KIND: ClassVar[MessageKind]

    def pack(self, payload: Any = None) -> Message:
        """Return a new message with this content, and a payload or none."""
        return Message(self.KIND, self, payload)


def body(kind: MessageKind) -> Callable[[type[B]], type[B]]:
    """Return a decorator that makes a class the body of a kind of messages, and lets frames be of that kind."""

    def make(cls: type[B]) -> type[B]:
        assert KINDS.setdefault(int(kind), kind) is kind, f"{kind!r} has the number of another kind"
        cls.KIND = kind
        return cls

    return make


def encode_body(message: Message) -> bytes:
    """Return the bytes of a message's body; MessageTooLargeError: over `MAX_BODY`."""
    try:
        data = _encode(message.body)
    except UnicodeEncodeError:  # half of a surrogate pair, which an error's text may hold
        data = _encode(_sendable(msgspec.to_builtins(message.body, enc_hook=_plain)))
    if len(data) > MAX_BODY:
        raise MessageTooLargeError(
            f"{message.kind.name} for {message.target} carries {len(data)} bytes beside its "
            f"payload, at most {MAX_BODY} fit into a message"
        )
    return data


def _plain(value: Any) -> Any:
    """Return a number or text of a derived type, such as NumPy's, as one of Python's own."""
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} does not travel")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def _sendable(value: Any) -> Any:
    """Return a value whose texts have escapes for halves of surrogate pairs, which UTF-8 has not."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(name): _sendable(part) for name, part in value.items()}
    return [_sendable(part) for part in value] if isinstance(value, (list, tuple)) else value


class BodyReader:
    """Reads bodies of one class that come from other processes."""

    def __init__(self, cls: type[Body]) -> None:
        self.fields = cls.__struct_fields__
        self._decode = msgspec.msgpack.Decoder(cls).decode
        hints = get_type_hints(cls, include_extras=True)
        self._conditions = [
            (name, condition) for name in self.fields if (condition := _condition_of(hints[name]))
        ]

    def read(self, data: bytes, limits: Limits) -> Body:
        """Return a body in a job of these limits; ProtocolError: it is none, and what is wrong with which field."""
        try:
            _check_parts(data)
            body = self._decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(self._wrong(data, str(error))) from None
        for name, condition in self._conditions:
            if not condition.fits(value := getattr(body, name), limits):
                raise ProtocolError(f"{name}={_shown.repr(value):.80}: give {condition.allowed}")
        return body

    def _wrong(self, data: bytes, why: str) -> str:
        """Return what msgspec has found wrong, with the field and its value."""
        if (place := _PLACE.search(why)) is None:
            return f"damaged fields: {why}"
        number, values = int(place[1]), _values(data)
        value = _shown.repr(values[number]) if number < len(values) else "?"
        return f"{self.fields[number]}={value:.80}: {why.replace('Expected', 'give', 1)}"

    def number(self, data: bytes) -> int:
        """Return the number of a request, by which its client awaits an answer, of a body that may be wrong; else 0."""
        sequence = dict(zip(self.fields, _values(data), strict=False)).get("sequence", 0)
        return sequence if type(sequence) is int and 0 <= sequence < MOST else 0


def _check_parts(data: bytes) -> None:
    """Raise ValueError for bytes of so many lists and maps that these would take much more memory than the bytes."""
    if len(data) > _FEW_BYTES and len(data.translate(None, _OTHERS)) > _MOST_PARTS:
        raise ValueError(f"more than {_MOST_PARTS} lists and maps")


def _values(data: bytes) -> list[Any]:
    """Return the values of a body's fields, whatever they are; empty if the bytes are none."""
    try:
        _check_parts(data)
        values = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []
    return values if isinstance(values, list) else []


reader_of = cache(BodyReader)


def _condition_of(annotation: Any) -> Condition | None:
    """Return what msgspec does not check of values of a type; None where it checks all of it."""
    assert annotation is not Any, "say what it may hold by `PLAIN`, or another condition"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        own = [
            condition for condition in annotation.__metadata__ if isinstance(condition, Condition)
        ]
        return own[0] if own else _condition_of(parts[0])
    if hasattr(annotation, "_fields"):  # a named tuple
        origin, parts = tuple, tuple(get_type_hints(annotation, include_extras=True).values())
    conditions = [
        (at, condition)
        for at, part in enumerate(parts)
        if (condition := _condition_of(part)) is not None
    ]
    if not conditions:
        return None
    at, condition = conditions[0]
    fits = condition.fits
    if origin in (Union, types.UnionType):
        return Condition(
            f"null, or {condition.allowed}",
            lambda value, limits: value is None or fits(value, limits),
        )
    if origin is not tuple or parts[-1] is ...:
        return Condition(
            f"a list, of each {condition.allowed}",
            lambda value, limits: all(fits(part, limits) for part in value),
        )
    if len(conditions) == 1:
        return Condition(
            f"{condition.allowed} at {at}", lambda value, limits: fits(value[at], limits)
        )
    return Condition(
        ", ".join(f"{condition.allowed} at {at}" for at, condition in conditions),
        lambda value, limits: all(
            condition.fits(value[at], limits) for at, condition in conditions
        ),
    )
