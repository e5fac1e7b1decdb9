"""Everything that is fuzzed."""

from __future__ import annotations

from tests.fuzz.data_files import CsvFiles, ParquetFiles, TripleFiles
from tests.fuzz.frame_parsers import Frames
from tests.fuzz.lying_server import MasterReplies, ShardReplies, StoreReplies
from tests.fuzz.master_calls import BareMasterCalls, JobCalls
from tests.fuzz.resp_server import LyingRedis, RedisReplies
from tests.fuzz.shard_calls import ShardCalls
from tests.fuzz.shared_memory import Attachments, Owners
from tests.fuzz.store_calls import StoreCalls
from tests.fuzz.stored_files import Checkpoints, FileStores, GraphFiles, HostEmbeddingFiles, VersionRecords
from tests.fuzz.target import Target
from tests.fuzz.words import TextFiles, Tokens, Words
from tests.fuzz.wrong_inputs import WRONG_INPUTS

__all__ = ["TARGETS"]

TARGETS: tuple[type[Target], ...] = (
    Frames,
    Words,
    RedisReplies,
    VersionRecords,
    StoreCalls,
    ShardCalls,
    BareMasterCalls,
    JobCalls,
    StoreReplies,
    ShardReplies,
    MasterReplies,
    LyingRedis,
    Attachments,
    Owners,
    Tokens,
    TextFiles,
    Checkpoints,
    FileStores,
    HostEmbeddingFiles,
    GraphFiles,
    CsvFiles,
    ParquetFiles,
    TripleFiles,
    *WRONG_INPUTS,
)
"""In the order in which a round runs them."""
