"""Protobuf messages filled at random from their descriptors, and the frames of bulk calls."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from elastable.embedding_store.wire.messages.frames import frame_prefix
from tests.fuzz.mutator import Mutator

__all__ = ["Words", "filled", "framed", "varied"]

Words = Callable[[Mutator, FieldDescriptor], object]
"""A value for a field, None where the field's type alone decides."""

_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_DEPTH = 4


def filled(m: Mutator, message: Message, words: Words, depth: int = 0) -> Message:
    """The message with some of its fields set."""
    for field in message.DESCRIPTOR.fields:
        if m.chance(0.7):
            _set(m, message, field, words, depth)  # type: ignore[arg-type]
    return message


def varied(m: Mutator, message: Message, words: Words, depth: int = 0) -> Message:
    """The message with one or two of its fields, however deep, changed."""
    fields = message.DESCRIPTOR.fields
    for _ in range(1 + m.small(1)):
        if not fields:
            break
        field = m.choice(fields)
        inner = _inner(m, message, field)  # type: ignore[arg-type]
        if inner is not None and m.chance(0.8):
            varied(m, inner, words, depth + 1)
        else:
            message.ClearField(field.name)  # type: ignore[attr-defined]
            if m.chance(0.9):
                _set(m, message, field, words, depth)  # type: ignore[arg-type]
    return message


def framed(m: Mutator, header: bytes, body: bytes, cut: bool = True) -> list[bytes]:
    """The frames of a bulk message, its body cut anywhere."""
    pieces = [body]
    while cut and m.chance(0.3) and pieces[-1]:
        last, place = pieces.pop(), m.small(40)
        pieces += [last[:place], last[place:]]
    return [frame_prefix(None if number else header, len(piece)) + piece for number, piece in enumerate(pieces)]


def _inner(m: Mutator, message: Message, field: FieldDescriptor) -> Message | None:
    if field.type != FieldDescriptor.TYPE_MESSAGE or _is_map(field):
        return None
    value = getattr(message, field.name)
    if _is_repeated(field):
        return m.choice(value) if len(value) else None
    return value if message.HasField(field.name) else None


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _set(m: Mutator, message: Message, field: FieldDescriptor, words: Words, depth: int) -> None:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))  # type: ignore[union-attr]
        entries = getattr(message, field.name)
        for _ in range(m.small(2)):
            if value.type == FieldDescriptor.TYPE_MESSAGE:
                filled(m, entries[_value(m, key, words)], words, depth + 1)
            else:
                entries[_value(m, key, words)] = _value(m, value, words)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if depth >= _DEPTH:
            return
        target = getattr(message, field.name)
        if _is_repeated(field):
            for _ in range(m.small(2)):
                filled(m, target.add(), words, depth + 1)
        else:
            target.SetInParent()
            filled(m, target, words, depth + 1)
    elif _is_repeated(field):
        getattr(message, field.name).extend(_value(m, field, words) for _ in range(m.small(3)))
    else:
        setattr(message, field.name, _value(m, field, words))


def _value(m: Mutator, field: FieldDescriptor, words: Words) -> object:
    told = words(m, field)
    if told is not None:
        return told
    if field.type in _RANGES:
        return m.small(4) if m.chance(0.6) else m.integer(*_RANGES[field.type])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return m.chance(0.5)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return m.choice([value.number for value in field.enum_type.values] + [99])  # type: ignore[union-attr]
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return m.number()
    return m.bytes(m.choice((0, 1, 16, 16, 16, 17))) if field.type == FieldDescriptor.TYPE_BYTES else m.text()
