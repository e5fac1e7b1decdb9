"""Dataclasses as protobuf messages and back, by the names of their fields."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from elastable.embedding_store.errors import BadInput

Data = TypeVar("Data")
Sent = TypeVar("Sent", bound=Message)
Kind = TypeVar("Kind", bound=Enum)

_Convert = Callable[..., Any]
# Descriptors are `Any`: protobuf has two implementations of them, with a type each.


def to_message(kind: type[Sent], /, *sources: object, **given: Any) -> Sent:
    """A message whose fields are the attributes of some objects, by name.

    Objects become messages, members of an enum their numbers, and a mapping of objects repeated messages, whose first
    field is the key. What is None, and what no object has, is left out.

    Args:
        kind: The message.
        sources: Have its fields; the last one that has a field counts.
        given: Fields that no object has so.
    """
    for name, value in given.items():
        if isinstance(value, Enum):
            given[name] = _number(value, kind.DESCRIPTOR.fields_by_name[name].enum_type)
    for source in sources:
        for name, convert in _sent_fields(kind, type(source)):  # type: ignore[arg-type]  # stubs say: not hashable
            if name not in given and (value := getattr(source, name)) is not None:
                given[name] = value if convert is None else convert(value)
    return kind(**given)


def from_message(kind: type[Data], message: Message, text: Callable[[str], str] = str, /, **given: Any) -> Data:
    """The inverse of `to_message`: optional fields that are not set are None, repeated ones tuples or mappings.

    Args:
        kind: A dataclass.
        message: Has its fields; those that it has not keep their defaults.
        text: What becomes of texts, those in objects included.
        given: Fields that the message does not have so.

    Raises:
        BadInput: a member of an enum that is not known here.
    """
    for name, read in _read_fields(kind, type(message)):  # type: ignore[arg-type]  # as above
        if name not in given:
            given[name] = read(message, text)
    return kind(**given)


def enum_member(kind: type[Kind], number: int, numbers: Any) -> Kind:
    """The member of that number.

    Raises:
        BadInput: there is none here.
    """
    for member, own in _numbers(kind, numbers).items():
        if own == number:
            found: Kind = member
            return found
    known = ", ".join(member.name.lower() for member in kind)
    name = numbers.full_name.partition(".v1.")[2]
    raise BadInput(f"{name} {number} is unknown: known are {known}; start all processes from one release")


def _number(member: Enum, numbers: Any) -> int:
    return int(_numbers(type(member), numbers)[member])


@cache
def _numbers(kind: Any, numbers: Any) -> dict[Any, int]:
    """proto names the member X of an enum `PushOutcome` PUSH_OUTCOME_X."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", numbers.name).upper()
    return {member: numbers.values_by_name[f"{prefix}_{member.name}"].number for member in kind}


@cache
def _sent_fields(kind: Any, source: Any) -> list[tuple[str, _Convert | None]]:
    """Fields of a message that an object has, and what is made of its values; None: they stay."""
    return [(of.name, _sent(of)) for of in kind.DESCRIPTOR.fields if hasattr(source, of.name) or _is_field(source, of)]


def _is_field(source: type, of: Any) -> bool:
    return of.name in getattr(source, "__dataclass_fields__", ())


def _sent(of: Any) -> _Convert | None:
    if of.enum_type is not None:
        numbers = of.enum_type
        return lambda member: _number(member, numbers)
    if of.message_type is None:
        return None
    if of.message_type.GetOptions().map_entry:
        value = _sent(of.message_type.fields_by_name["value"])
        return dict if value is None else lambda every: {key: value(each) for key, each in every.items()}
    kind, key = GetMessageClass(of.message_type), of.message_type.fields[0].name

    def sent(value: Any) -> Any:
        if not of.is_repeated:
            return value if isinstance(value, Message) else to_message(kind, value)
        if isinstance(value, Mapping):
            return [to_message(kind, each, **{key: name}) for name, each in value.items()]
        return [to_message(kind, each) for each in value]

    return sent


@cache
def _read_fields(kind: Any, message: Any) -> list[tuple[str, _Convert]]:
    """Fields of a dataclass that a message has, and how they are read from it."""
    hints, known = get_type_hints(kind), message.DESCRIPTOR.fields_by_name
    return [(of.name, _reader(known[of.name], hints[of.name])) for of in fields(kind) if of.name in known]


def _reader(of: Any, hint: Any) -> _Convert:
    name, each = of.name, _read(of, _object(hint))
    if of.message_type is not None and of.message_type.GetOptions().map_entry:
        value = _read(of.message_type.fields_by_name["value"], _object(hint))
        return lambda message, text: {text(key): value(one, text) for key, one in getattr(message, name).items()}
    if of.is_repeated:
        if not issubclass(getattr(hint, "__origin__", tuple), tuple):
            key = of.message_type.fields[0].name
            return lambda message, text: {text(getattr(one, key)): each(one, text) for one in getattr(message, name)}
        return lambda message, text: tuple(each(one, text) for one in getattr(message, name))
    if of.has_presence and NoneType in get_args(hint):
        return lambda message, text: each(getattr(message, name), text) if message.HasField(name) else None
    return lambda message, text: each(getattr(message, name), text)


def _read(of: Any, kind: Any) -> _Convert:
    """What a value becomes."""
    if of.enum_type is not None:
        numbers = of.enum_type
        return lambda value, text: enum_member(kind, value, numbers)
    if of.message_type is not None:
        return lambda value, text: from_message(kind, value, text)
    if of.type == FieldDescriptor.TYPE_STRING:
        return lambda value, text: text(value)
    return lambda value, text: value


def _object(hint: Any) -> Any:
    """The type of what a hint holds: of the values of a mapping, the items of a tuple, or what is not None."""
    held = [kind for kind in get_args(hint) if kind not in (NoneType, Ellipsis)]
    return held[-1] if held else hint
