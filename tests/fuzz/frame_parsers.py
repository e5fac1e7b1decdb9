"""Parsers of frames, without a server around them."""

import numpy as np

from elastable.master.api import DenseSnapshot
from elastable.master.rpc.bulk_messages import dense_frames, dense_from_frames
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


DENSE = Call(_dense, bulk=master_pb2.DenseFrame, parsers={"Dense": dense_from_frames})
CALLS = (*STORE_CALLS.values(), *SHARD_CALLS.values(), *MASTER_CALLS.values(), DENSE)
PARSERS = {name: (call, parse) for call in CALLS for name, parse in (call.parsers or {}).items()}
"""Name of a parser -> a call that it is of, and the parser."""


class Frames(Target):
    """Each kind of bulk message, as its parser reads it."""

    name = "frames"
    share = 3000

    def case(self, m: Mutator) -> str | None:
        call, parse = PARSERS[m.choice(sorted(PARSERS))]
        parse(iter(made_messages(m, call, words_of_all)))
        return None
