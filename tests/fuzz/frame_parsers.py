"""Parsers of frames, without a server around them."""

from collections.abc import Callable, Iterable

import numpy as np

from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import FrameReader
from elastable.embedding_store.wire.messages.store_messages import (
    blocks_from_frames,
    ids_from_frames,
    record_from_frames,
    reset_from_frames,
)
from elastable.embedding_store.wire.pushes.push_messages import (
    pushed_commit_from_frames,
    row_push_from_frames,
)
from elastable.master.api import DenseSnapshot
from elastable.master.rpc.bulk_messages import (
    dense_frames,
    dense_from_frames,
    evaluation_from_frames,
    push_from_frames,
)
from elastable.master.v1 import master_pb2
from tests.fuzz.calls import Call, Seed, made_messages
from tests.fuzz.master_calls import MASTER_CALLS, words_of_all
from tests.fuzz.mutator import Mutator
from tests.fuzz.shard_calls import SHARD_CALLS
from tests.fuzz.store_calls import STORE_CALLS
from tests.fuzz.target import Target


def _dense(m: Mutator) -> Seed:
    snapshot = DenseSnapshot(m.small(3), (np.ones((2, 3), np.float32),), (np.arange(3),), ("kernel",), ("count",))
    frame = master_pb2.DenseFrame.FromString(next(dense_frames(snapshot)))
    return frame.header, frame.body


PARSERS: dict[str, tuple[Call, Callable[[Iterable[bytes]], object]]] = {
    "LookupRequest": (
        STORE_CALLS["Lookup"],
        lambda frames: FrameReader(frames, "LookupRequest").header(store_pb2.LookupHeader),
    ),
    "RowIds": (STORE_CALLS["Delete"], ids_from_frames),
    "RowBlock": (STORE_CALLS["Put"], lambda frames: list(blocks_from_frames(frames))),
    "ClientPush": (STORE_CALLS["PushRows"], row_push_from_frames),
    "RowPush": (SHARD_CALLS["PushRows"], row_push_from_frames),
    "CommitPushed": (SHARD_CALLS["CommitPushed"], pushed_commit_from_frames),
    "Record": (STORE_CALLS["ResetVersion"], record_from_frames),
    "ResetVersion": (STORE_CALLS["ResetVersion"], reset_from_frames),
    "Gradient": (MASTER_CALLS["ReportGradient"], push_from_frames),
    "Evaluation": (MASTER_CALLS["ReportEvaluation"], evaluation_from_frames),
    "Dense": (Call(_dense, master_pb2.DenseFrame), dense_from_frames),
}
"""Name of a parser -> a call that it is of, and the parser."""


class Frames(Target):
    """Each kind of bulk message, as its parser reads it."""

    name = "frames"
    share = 3000

    def case(self, m: Mutator) -> str | None:
        call, parse = PARSERS[m.choice(sorted(PARSERS))]
        parse(iter(made_messages(m, call, words_of_all)))
        return None
