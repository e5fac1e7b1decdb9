import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store import INITIALIZER_KINDS, InitializerSpec, ShardOrigin, TableSpec, initial_rows
from elastable.embedding_store.tables.initial_values import _philox, _standard_normal, table_key, write_initial_rows
from elastable.embedding_store.tables.row_dtypes import rounding_bits

IDS = np.array([0, -1, 5, 2**63 - 1, -(2**63), 5], np.int64)

PINNED_KEY = [1289519249, 4025156722]
PINNED = {
    "uniform": [
        [1056361012, 3208113856, 3206897802, 1063301786, 1045031512],
        [1059247394, 3203115632, 1060969332, 1060312780, 1065296252],
    ],
    "normal": [
        [3199534235, 3221548123, 3220611986, 1057724546, 3208647540],
        [3183256364, 3217981123, 1039962481, 1024552272, 1073150314],
    ],
    "truncated_normal": [
        [3200658826, 3221252477, 3220148952, 1053531065, 3208841890],
        [3189052641, 3217717891, 1027747903, 3170456710, 1064864165],
    ],
}


def table(kind: str = "normal", a: float = 0.5, b: float = 2.0, dim: int = 6, **other: object) -> TableSpec:
    return TableSpec("t", dim, initializer=InitializerSpec(kind, a, b), **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Source: kat_vectors of Random123 (Salmon et al.), philox4x32 with 10 rounds.
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert [int(word) for word in _philox(*map(np.uint64, counter + key))] == words


def test_normal_quantiles_equal_the_standard_librarys() -> None:
    normal = statistics.NormalDist()
    shares = np.concatenate([np.linspace(0.001, 0.999, 999), 10.0 ** -np.linspace(3, 9.9, 100)])
    for share in shares.tolist():
        assert _standard_normal(share) == pytest.approx(normal.inv_cdf(share), rel=1e-14, abs=1e-300)


def test_values_are_pinned() -> None:
    # Stored rows and checkpoints count on these never changing.
    assert [int(word) for word in table_key(7, "cities")] == PINNED_KEY
    for kind, expected in PINNED.items():
        rows = initial_rows(TableSpec("cities", 5, initializer=InitializerSpec(kind, -1.0, 1.0), seed=7), IDS[:2])
        assert rows.view(np.uint32).tolist() == expected, kind


@pytest.mark.parametrize("kind", INITIALIZER_KINDS)
def test_a_value_depends_on_id_and_column_alone(kind: str) -> None:
    spec = table(kind)
    whole = initial_rows(spec, IDS)
    assert (whole.shape, whole.dtype) == ((6, 6), np.float32)
    for order in (IDS[::-1], IDS[2:3], np.repeat(IDS, 3)):
        expected = np.stack([whole[np.flatnonzero(one == IDS)[0]] for one in order])
        assert initial_rows(spec, order).tobytes() == expected.tobytes()
    for dim in (1, 2, 3, 5):  # the columns that narrower tables have are the same
        assert initial_rows(table(kind, dim=dim), IDS).tobytes() == whole[:, :dim].tobytes()


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_seed_and_name_change_the_values(one: int, seed: int) -> None:
    ids = np.array([one], np.int64)
    spec = TableSpec("t", 8, seed=seed)
    other = TableSpec("u", 8, seed=seed)
    later = TableSpec("t", 8, seed=seed ^ 1)
    rows = [initial_rows(each, ids).tobytes() for each in (spec, other, later)]
    assert len(set(rows)) == 3


def test_distributions() -> None:
    ids = np.arange(50_000)
    uniform = initial_rows(table("uniform", -3.0, 1.0), ids)
    assert -3 <= uniform.min() < -2.999
    assert 0.999 < uniform.max() <= 1
    assert (uniform.mean(), uniform.std()) == pytest.approx((-1, 4 / 12**0.5), abs=0.01)
    normal = initial_rows(table("normal", 0.5, 2.0), ids)
    assert (normal.mean(), normal.std()) == pytest.approx((0.5, 2), abs=0.02)
    # The deviation of a normal cut at 2 is 0.8796 of the whole one's.
    cut = initial_rows(table("truncated_normal", 0.5, 2.0), ids)
    assert np.abs(cut - 0.5).max() <= 4
    assert (cut.mean(), cut.std()) == pytest.approx((0.5, 2 * 0.87962566), abs=0.02)
    for values in (uniform, normal, cut):  # neighbouring ids and columns are unrelated
        centred = values - values.mean()
        assert abs((centred[1:] * centred[:-1]).mean()) < 0.02 * values.var()
        assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < 0.02 * values.var()


def test_writing_into_chosen_rows() -> None:
    spec = table()
    out = np.full((4, 6), 9, np.float32)
    write_initial_rows(spec, IDS[:2], np.array([3, 1]), out)
    np.testing.assert_array_equal(out[[3, 1]], initial_rows(spec, IDS[:2]))
    assert (out[[0, 2]] == 9).all()
    assert initial_rows(spec, IDS[:4], out) is out
    np.testing.assert_array_equal(out, initial_rows(spec, IDS[:4]))


@given(
    kind=st.sampled_from(INITIALIZER_KINDS),
    ids=st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=6),
    shards=st.integers(1, 7),
    columns=st.tuples(st.integers(0, 12), st.integers(1, 13)),
    dim=st.integers(1, 13),
)
def test_a_shard_reads_its_part(kind: str, ids: list[int], shards: int, columns: tuple[int, int], dim: int) -> None:
    first, width = min(columns[0], dim - 1), columns[1]
    width = min(width, dim - first)
    whole_ids = np.array(ids, np.int64)
    whole = initial_rows(table(kind, dim=dim), whole_ids)
    for shard in range(shards):
        mine = whole_ids % shards == shard
        spec = table(kind, dim=width, origin=ShardOrigin(shards, shard, first))
        part = initial_rows(spec, whole_ids[mine] // shards)
        assert part.tobytes() == whole[mine, first : first + width].tobytes()


def test_a_shard_of_columns_far_out() -> None:
    whole = initial_rows(table(dim=65_536), IDS[:1])
    for first in (0, 1, 32_767, 65_533):
        part = initial_rows(table(dim=3, origin=ShardOrigin(first_column=first)), IDS[:1])
        assert part.tobytes() == whole[:, first : first + 3].tobytes()


PINNED_BITS = [[21900, 26254, 59189], [59527, 28169, 38674]]
MORE_IDS = np.array([0, -1, 5, 2**63 - 1, -(2**63), 2**32], np.int64)


def test_bits_are_those_of_philox() -> None:
    spec = TableSpec("t", 21, seed=9)
    bits, key = rounding_bits(spec, MORE_IDS, 7), table_key(9, "t", b"rounding")
    assert (bits.dtype, bits.shape) == (np.dtype("<u2"), (6, 21))
    for row, one in enumerate(MORE_IDS.tolist()):
        for column in range(21):
            counter = [one & 0xFFFFFFFF, (one >> 32) & 0xFFFFFFFF, column // 8, 7]
            word = int(_philox(*map(np.uint64, counter), *key)[column % 8 // 2])  # type: ignore[call-arg]
            assert bits[row, column] == (word >> 16 if column % 2 else word & 0xFFFF)


def test_bits_are_pinned() -> None:
    # Trained rows count on these never changing.
    assert rounding_bits(TableSpec("cities", 3, seed=7), MORE_IDS[:2], 1).tolist() == PINNED_BITS


def test_every_part_of_the_name_of_a_number_changes_its_bits() -> None:
    spec = TableSpec("t", 64)
    found = [
        rounding_bits(spec, MORE_IDS[:1], 0),
        rounding_bits(spec, MORE_IDS[:1], 1),
        rounding_bits(spec, MORE_IDS[1:2], 0),
        rounding_bits(TableSpec("u", 64), MORE_IDS[:1], 0),
        rounding_bits(TableSpec("t", 64, seed=1), MORE_IDS[:1], 0),
    ]
    assert len({bits.tobytes() for bits in found}) == len(found)
    assert table_key(0, "t", b"rounding") != table_key(0, "t")


def test_bits_are_spread_evenly() -> None:
    bits = rounding_bits(TableSpec("t", 32), np.arange(20_000), 3).astype(np.float64)
    assert abs(bits.mean() - 32767.5) < 5 * 65536 / 12**0.5 / bits.size**0.5
    centred = (bits - bits.mean()) / bits.std()
    for one, other in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((one * other).mean()) < 0.01
