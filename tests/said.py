"""Messages as tests make and read them: by their kinds' fields, of which only those that matter are given."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from steepest.core.messages.fields import Limits
from steepest.core.messages.message import Message, MessageKind, Peer
from steepest.core.messages.schema import Body, reader_of

_USUAL: tuple[Any, ...] = (0, False, "", [], {}, ["client", 0], "weights")


def bodies(cls: type[Body] = Body) -> Iterator[type[Body]]:
    """Yield the bodies of all kinds, as far as they are imported."""
    for each in cls.__subclasses__():
        if "KIND" in each.__dict__:
            yield each
        yield from bodies(each)


def body_of(kind: MessageKind) -> type[Body]:
    """Return the body of a kind."""
    return next(each for each in bodies() if each.KIND is kind)


@cache
def _defaults(cls: type[Body]) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(cls):
        if field.required:
            found[field.name] = next(filter(None, (_converted(v, field.type) for v in _USUAL)))[0]
    return found


def _converted(value: Any, annotation: Any) -> list[Any]:
    try:
        return [msgspec.convert(value, annotation)]
    except msgspec.ValidationError:
        return []


def said(
    kind: MessageKind,
    payload: Any = None,
    source: Peer | None = None,
    target: Peer | None = None,
    **fields: Any,
) -> Message:
    """Return a message; fields that its body needs and that are not given are 0 or empty."""
    cls = body_of(kind)
    return Message(kind, cls(**{**_defaults(cls), **fields}), payload, source, target)


def heard(message: Message) -> Any:
    """Return the body of a message, which may be one that has arrived and was not checked."""
    if isinstance(message.body, bytes):
        return reader_of(body_of(message.kind)).read(message.body, Limits())
    return message.body


def with_fields(message: Message, **fields: Any) -> Message:
    """Return a message with another body."""
    body = msgspec.structs.replace(heard(message), **fields)
    return Message(message.kind, body, message.payload, message.source, message.target)
