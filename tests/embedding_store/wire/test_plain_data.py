"""What a store server says of itself and of its rows comes back as it was, whatever of it is set."""

import pytest
from google.protobuf.message import Message

from elastable.embedding_store.shards.ownership import Claim
from elastable.embedding_store.shards.server_contract import ChangedTable, Committed, ShardStatus, TakenChanges
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (TakenChanges(3, {}), store_pb2.TakeChangesReply),
        (TakenChanges(3, {"a": ChangedTable(5, 2, True), "b": ChangedTable(0)}), store_pb2.TakeChangesReply),
        (Committed((3, 1), ("a", "b"), True), store_pb2.CommitPushedReply),
        (Claim("here:7", "j", True, 1, 2, b"k" * 16), store_pb2.ClaimRequest),
        (ShardStatus(5, rows=7, store="memory"), store_pb2.ShardStatus),
    ],
)
def test_plain_data_comes_back_as_it_was(plain: object, message: type[Message]) -> None:
    assert from_message(type(plain), message.FromString(to_message(message, plain).SerializeToString())) == plain
