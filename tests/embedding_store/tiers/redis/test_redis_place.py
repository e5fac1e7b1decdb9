"""The servers of one store, and a transaction that Redis refuses to a superseded writer."""

import pytest

from elastable.embedding_store.errors import StoreFailed, TakenOver
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace

KEY = b"{elastable}:something"


def set_to(value: int) -> list[Command]:
    return [("SET", KEY, value)]


def test_a_change_of_a_superseded_writer_is_refused(node_or_cluster_url: str) -> None:
    first, second = RedisPlace(node_or_cluster_url), RedisPlace(node_or_cluster_url)
    first.change([], lambda answers: set_to(1), first.deadline())
    second.take_over()
    first._admit = lambda connection, deadline: None  # type: ignore[method-assign]  # as if it had read before
    with pytest.raises(TakenOver, match="was taken over, its owner is now process"):
        first.change([], lambda answers: set_to(2), first.deadline())
    with pytest.raises(TakenOver):
        first.require_owner()
    second.require_owner()
    first.close()
    second.close()


def test_a_writer_that_is_superseded_between_question_and_change(redis_url: str) -> None:
    first, second = RedisPlace(redis_url), RedisPlace(redis_url)
    first.take_over()

    def overtaken(answers: list[object]) -> list[Command]:
        second.owner = "other:1:x"
        second.topology.call([(KEY, ("SET", "{elastable}:owner", "other:1:x:0"))], second.deadline())
        return set_to(3)

    with pytest.raises(TakenOver):
        first.change([], overtaken, first.deadline())
    assert second.topology.call([(KEY, ("GET", KEY))], second.deadline()) == [None]
    first.close()
    second.close()
    with pytest.raises(StoreFailed, match="is closed"):
        first.change([], lambda answers: set_to(4), first.deadline())
