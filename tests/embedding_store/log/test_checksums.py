"""Checksums are those of zlib."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.log.framing import crc32_of


@given(st.lists(st.binary(max_size=5_000), max_size=5), st.integers(0, 7))
def test_checksums_are_those_of_zlib_piece_by_piece(pieces: list[bytes], offset: int) -> None:
    ours = theirs = 0
    for piece in pieces:
        view = memoryview(piece)[offset:]
        ours, theirs = crc32_of(view, ours), zlib.crc32(view, theirs)
        assert ours == theirs
