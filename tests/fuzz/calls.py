"""Calls of a gRPC service as a hostile client makes them: requests filled at random from their descriptors."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY, error_class, status_code
from elastable.embedding_store.wire.messages.frames import frame_prefix
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Finding, Target

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
    if field.is_repeated:
        return m.choice(value) if len(value) else None
    return value if message.HasField(field.name) else None


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
        if field.is_repeated:
            for _ in range(m.small(2)):
                filled(m, target.add(), words, depth + 1)
        else:
            target.SetInParent()
            filled(m, target, words, depth + 1)
    elif field.is_repeated:
        getattr(message, field.name).extend(_value(m, field, words) for _ in range(m.small(3)))
    else:
        setattr(message, field.name, _value(m, field, words))


def _value(m: Mutator, field: FieldDescriptor, words: Words) -> object:
    known = words(m, field)
    if known is not None:
        return known
    if field.type in _RANGES:
        return m.small(4) if m.chance(0.6) else m.integer(*_RANGES[field.type])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return m.chance(0.5)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return m.choice([value.number for value in field.enum_type.values] + [99])  # type: ignore[union-attr]
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return m.number()
    return m.bytes(m.choice((0, 1, 16, 16, 16, 17))) if field.type == FieldDescriptor.TYPE_BYTES else m.text()


WAIT_S = 60.0

Seed = tuple[Message, bytes]
"""A request that may be right: the message, or a bulk call's header, and the body of a bulk call."""

# What costs much though it is right: field -> the largest value that is tried, and the largest that is taken.
_WHOLE = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64)
_COSTLY: dict[str, tuple[Any, Any]] = {
    "wait_ms": (20, 60_000),
    "counters": (1 << 12, 1 << 30),
    "dim": (64, 65_536),
    "lease_s": (0.5, 3600.0),
}


@dataclass(frozen=True, slots=True)
class Call:
    """How a call is made by a hostile client, by Elastable's own client of a server that lies, and read without either.

    Attributes:
        ask: Makes it through a client; None: its method of the call's name.
    """

    seed: Callable[[Mutator], Seed]  # a request that may be right
    ask: Callable[[Any], object] | None = None
    bulk: type[Message] | None = None  # the message of a frame, where the call is made of frames
    parsers: Mapping[str, Callable[[Iterable[bytes]], object]] | None = None  # of its frames, by name
    first_reply: bool = False  # only the first reply is waited for: the call lasts as long as its client


def plain(kind: type[Message], words: Words, ask: Callable[[Any], object] | None = None) -> Call:
    """A call of one message that is drawn from its fields."""
    return Call(lambda m: (filled(m, kind(), words), b""), ask)


def served(held: ExitStack, *services: Service) -> tuple[GrpcServer, grpc.Channel]:
    """A server where everybody is an administrator, and a channel to it."""
    server = held.enter_context(GrpcServer("127.0.0.1:0", services, anonymous=Role.ADMINISTRATOR))
    return server, held.enter_context(grpc.insecure_channel(server.address))


class CallTarget(Target):
    service: ServiceDescriptor  # whose calls
    calls: Mapping[str, Call]  # name of a call -> how it is made; the names are those of the service, each of them
    channel: grpc.Channel  # to the server
    metadata: tuple[tuple[str, str | bytes], ...] = ()  # sent with each call
    rare: frozenset[str] = frozenset()  # calls after which much has to be made anew

    def case(self, m: Mutator) -> str | None:
        name = m.choice(sorted(self.calls))
        if name in self.rare and m.chance(0.9):
            name = m.choice(sorted(set(self.calls) - self.rare))
        method = self.service.methods_by_name[name]
        call = self.calls[method.name]
        messages = self._messages(m, method, call)
        try:
            self._send(method, call, messages)
        except grpc.RpcError as error:
            return f"{method.name}: {_named(error, method.name, messages)}"
        return f"{method.name}: done"

    @abstractmethod
    def words(self, m: Mutator, field: FieldDescriptor) -> Any:
        """A value for a field of a request, None for any."""

    def _messages(self, m: Mutator, method: MethodDescriptor, call: Call) -> list[bytes]:
        """What is sent, unless it asks for something that is right and costs much."""
        while True:
            made = made_messages(m, call, self.words)
            if not any(_costs(call, method, message) for message in made):
                return made

    def _send(self, method: MethodDescriptor, call: Call, messages: Sequence[bytes]) -> None:
        path = f"/{self.service.full_name}/{method.name}"
        one = len(messages) == 1
        if not method.server_streaming:
            if one:
                self.channel.unary_unary(path, None, None)(messages[0], WAIT_S, self.metadata)
            else:
                self.channel.stream_unary(path, None, None)(iter(messages), WAIT_S, self.metadata)
            return
        if one:
            replies = self.channel.unary_stream(path, None, None)(messages[0], WAIT_S, self.metadata)
        else:
            replies = self.channel.stream_stream(path, None, None)(iter(messages), WAIT_S, self.metadata)
        for _ in replies:
            if call.first_reply:
                replies.cancel()
                break


def made_messages(m: Mutator, call: Call, words: Words) -> list[bytes]:
    """What is sent: right, wrong in a field, wrong throughout, or no message at all."""

    def bounded(m: Mutator, field: FieldDescriptor) -> object:
        if field.name in _COSTLY and field.type in _WHOLE:
            tried, taken = _COSTLY[field.name]
            return m.choice((-1, 0, 1, 2, 3, 4, m.small(tried), taken + 1))
        return words(m, field)

    message, body = call.seed(m)
    way = m.small(9)
    if 2 <= way <= 5:
        varied(m, message, bounded)
    elif way == 6:
        message = filled(m, type(message)(), bounded)
    header = message.SerializeToString()
    if way == 7:
        header = m.mutated(header)
    if call.bulk is None:
        return [] if m.chance(0.005) else [header] * (1 if m.chance(0.99) else 2)
    if m.chance(0.15):
        body = m.mutated(body)
    frames = framed(m, header, body)
    if way == 8:
        place = m.random.randrange(len(frames))
        frames[place] = m.mutated(frames[place])
    if m.chance(0.03):
        frames = frames[:-1] if m.chance(0.5) else frames * 2
    return frames


def _named(error: grpc.RpcError, call: str, messages: Sequence[bytes]) -> str:
    """The name that a server gave to an error; a `Finding` where it gave none, or another status than the name's."""
    assert isinstance(error, grpc.Call)
    name = str(dict(error.trailing_metadata() or ()).get(ERROR_KEY, ""))
    kind = error_class(name)
    sent = [message[:400] for message in messages[:4]]
    if kind is None:
        raise Finding(f"{call} ends with {error.code()} and no name: {error.details()!r}; it was sent {sent}")
    if error.code() is not status_code(kind):
        raise Finding(f"{call} ends with {error.code()}, where {name} has {status_code(kind)}; it was sent {sent}")
    return name


def _costs(call: Call, method: MethodDescriptor, sent: bytes) -> bool:
    """Whether bytes say, by chance, something right that takes a minute or a gigabyte."""
    kind = call.bulk or class_of(method)
    try:
        message = kind.FromString(sent)
    except DecodeError:
        return False
    return _is_costly(message)


def class_of(method: MethodDescriptor) -> type[Message]:
    """The class of the messages that are sent."""
    made: type[Message] = method.input_type._concrete_class  # type: ignore[attr-defined]
    return made


def _is_costly(message: Message) -> bool:
    for field, value in message.ListFields():
        if field.name in _COSTLY:
            tried, taken = _COSTLY[field.name]
            if tried < value <= taken:
                return True
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:  # type: ignore[union-attr]
            inner = value if field.is_repeated else [value]
            if any(_is_costly(one) for one in inner):
                return True
    return False
