"""Counter-based random numbers: a pure function of a key and a counter.

Words are SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): word i of
a key is the mixed `key + (i + 1) * golden`. A number below `bound` is the upper half of a word, multiplied up: of 2**32
values none is favoured by more than `bound / 2**32`.
"""

import numpy as np

from elastable.embedding_store.contract.arrays import Int32, Int64, UInt64
from elastable.embedding_store.native.kernel import kernel

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, *words: int) -> np.uint64:
    """The key of an independent stream for these numbers.

    Args:
        seed: An integer; a negative one counts as its two's complement.
        words: Not negative, below 2**64.
    """
    return np.uint64(np.random.SeedSequence([seed & (2**64 - 1), *words]).generate_state(1, np.uint64)[0])


@kernel
def _word(key: np.uint64, place: np.uint64) -> np.uint64:
    word = key + (place + np.uint64(1)) * _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _MIX_A
    word = (word ^ (word >> np.uint64(27))) * _MIX_B
    return word ^ (word >> np.uint64(31))


@kernel
def derived_keys(key: np.uint64, words: Int64) -> UInt64:
    """uint64 `[k]`: a key for each of `words` (int64 `[k]`), much cheaper than as many `stream_key`s."""
    keys = np.empty(len(words), np.uint64)
    for i in range(len(words)):
        keys[i] = _word(_word(key, np.uint64(words[i])), np.uint64(0))
    return keys


@kernel
def draw_between(keys: UInt64, first: Int64, count: Int64, draws: int) -> Int32:
    """Uniform numbers `first <= x < first + count`.

    Args:
        keys: uint64 `[k]`.
        first: int64 `[k, rows]`.
        count: int64 `[k, rows]`; numbers are 0 where it is 0.
        draws: Numbers per row.

    Returns:
        int32 `[k, rows, draws]`.
    """
    drawn = np.empty((*first.shape, draws), np.int32)
    for i in range(len(keys)):
        word = np.uint64(0)
        for row in range(drawn.shape[1]):
            bound = np.uint64(count[i, row])
            for j in range(draws):
                below = ((_word(keys[i], word) >> np.uint64(32)) * bound) >> np.uint64(32)
                word += np.uint64(1)
                drawn[i, row, j] = first[i, row] + np.int64(below) if bound else 0
    return drawn


def permutation(count: int, key: np.uint64) -> Int64:
    """int64 `[count]`: 0 .. count - 1, shuffled."""
    return shuffled_segments(np.array([0, count], np.int64), key)


@kernel
def shuffled_segments(ends: Int64, key: np.uint64) -> Int64:
    """int64 `[N]`: 0 .. N - 1, shuffled within each segment (Fisher and Yates).

    Args:
        ends: int64 `[segments + 1]`: segment i is `ends[i] .. ends[i + 1] - 1`; the first is 0, the last N.
        key: Its words 0 .. N - 1 are used.
    """
    order = np.arange(ends[-1])
    for segment in range(len(ends) - 1):
        first = ends[segment]
        for last in range(ends[segment + 1] - 1, first, -1):
            # 63 bits and a remainder: segments may be longer than 2**32
            choice = first + np.int64(_word(key, np.uint64(last)) >> np.uint64(1)) % (last - first + 1)
            order[last], order[choice] = order[choice], order[last]
    return order
