"""Calls of a gRPC service as a hostile client makes them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY, error_class, status_code
from tests.fuzz.messages import Words, filled, framed, varied
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Finding, Target

__all__ = ["Call", "CallTarget", "Seed", "made_messages"]

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
    """How one call is made.

    Attributes:
        seed: A request that may be right.
        bulk: The message of a frame, where the call is made of frames.
        first_reply: Only the first reply is waited for: the call lasts as long as its client.
    """

    seed: Callable[[Mutator], Seed]
    bulk: type[Message] | None = None
    first_reply: bool = False


class CallTarget(Target):
    """The calls of one service.

    Attributes:
        service: Whose calls.
        calls: Name of a call -> how it is made; the names are those of the service, each of them.
        channel: To the server.
        metadata: Sent with each call.
        rare: Calls after which much has to be made anew.
    """

    service: ServiceDescriptor
    calls: Mapping[str, Call]
    channel: grpc.Channel
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    rare: frozenset[str] = frozenset()

    def case(self, m: Mutator) -> str | None:
        """One call, with what came of it."""
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
    kind = call.bulk or _class_of(method)
    try:
        message = kind.FromString(sent)
    except DecodeError:
        return False
    return _is_costly(message)


def _class_of(method: MethodDescriptor) -> type[Message]:
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
