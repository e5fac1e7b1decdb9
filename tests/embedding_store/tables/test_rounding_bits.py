import numpy as np

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.tables.initial_values import _philox, table_key
from elastable.embedding_store.tables.row_dtypes import rounding_bits, rounding_key

PINNED = [[21900, 26254, 59189], [59527, 28169, 38674]]
IDS = np.array([0, -1, 5, 2**63 - 1, -(2**63), 2**32], np.int64)


def test_bits_are_those_of_philox() -> None:
    spec = TableSpec("t", 21, seed=9)
    bits, key = rounding_bits(spec, IDS, 7), rounding_key(9, "t")
    assert (bits.dtype, bits.shape) == (np.dtype("<u2"), (6, 21))
    for row, one in enumerate(IDS.tolist()):
        for column in range(21):
            counter = [one & 0xFFFFFFFF, (one >> 32) & 0xFFFFFFFF, column // 8, 7]
            word = int(_philox(*map(np.uint64, counter), *key)[column % 8 // 2])  # type: ignore[call-arg]
            assert bits[row, column] == (word >> 16 if column % 2 else word & 0xFFFF)


def test_bits_are_pinned() -> None:
    # Trained rows count on these never changing.
    assert rounding_bits(TableSpec("cities", 3, seed=7), IDS[:2], 1).tolist() == PINNED


def test_every_part_of_the_name_of_a_number_changes_its_bits() -> None:
    spec = TableSpec("t", 64)
    found = [
        rounding_bits(spec, IDS[:1], 0),
        rounding_bits(spec, IDS[:1], 1),
        rounding_bits(spec, IDS[1:2], 0),
        rounding_bits(TableSpec("u", 64), IDS[:1], 0),
        rounding_bits(TableSpec("t", 64, seed=1), IDS[:1], 0),
    ]
    assert len({bits.tobytes() for bits in found}) == len(found)
    assert rounding_key(0, "t") != table_key(0, "t")


def test_bits_are_spread_evenly() -> None:
    bits = rounding_bits(TableSpec("t", 32), np.arange(20_000), 3).astype(np.float64)
    assert abs(bits.mean() - 32767.5) < 5 * 65536 / 12**0.5 / bits.size**0.5
    centred = (bits - bits.mean()) / bits.std()
    for one, other in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((one * other).mean()) < 0.01
